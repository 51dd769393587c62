"""mlx's GPU errors are told from every other exception, and each gets its sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backend.runs import checkpoint
from backend.runs.run_folder import RunFolder
from backend.trainer.machine import BUFFERS, DISCARDED, INTERACTIVITY, MEMORY, OTHER, TIMEOUT, gpu_error
from backend.training.learner import Learner
from backend.utils.errors import UserError
from tests.support import failing_gpu, small_run
from tests.support.cases import cases

METAL = failing_gpu.METAL
TEXTS = {
    failing_gpu.INTERACTIVITY: INTERACTIVITY,
    failing_gpu.OUT_OF_MEMORY: MEMORY,
    METAL + "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout).": TIMEOUT,
    METAL + "Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)": TIMEOUT,
    failing_gpu.IGNORED: DISCARDED,
    METAL
    + "Discarded (victim of GPU error/recovery) (00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)": DISCARDED,
    METAL + "Caused GPU Address Fault Error (0000000b:kIOGPUCommandBufferCallbackErrorPageFault)": OTHER,
    METAL + "Internal Error (0000010a:Internal Error)": OTHER,
    "[metal::malloc] Resource limit (499000) exceeded.": BUFFERS,
    "[metal::malloc] Attempting to allocate 18253611008 bytes which is greater than the maximum allowed buffer size of "
    "17179869184 bytes.": MEMORY,
    "[malloc] Unable to allocate 1073741824 bytes.": MEMORY,
    "[malloc_async] Unable to allocate 1073741824 bytes.": MEMORY,
    "cudaMallocAsync failed: out of memory": MEMORY,
    "cudaMallocAsync(&data, size, stream) failed: out of memory": MEMORY,
    "cudaGraphInstantiate(&graph_exec_, graph_, nullptr, nullptr, 0) failed: out of memory": MEMORY,
}


@cases("text", TEXTS)
def test_texts_as_mlx_and_metal_write_them(text: str) -> None:
    error = gpu_error(RuntimeError(text))
    assert error is TEXTS[text]
    assert all(sentence.endswith(".") for sentence in (error.happened, error.advice))


def test_a_run_without_memory_is_saved(tmp_path: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    learn = Learner.learn

    def hungry(learner: Learner, *arguments: Any) -> dict[str, float]:
        if learner.updates == 2:
            raise MemoryError
        return learn(learner, *arguments)

    monkeypatch.setattr(Learner, "learn", hungry)
    ending = small_run.train_here(small_run.settings_for(tmp_path, iters=5), run)
    assert (ending.kind, ending.exit_code, ending.step) == ("failed", 2, 2)
    assert ending.sentence.startswith("There was not enough memory for the arrays of a step.")
    saved = checkpoint.newest(run)
    assert saved is not None and saved.state.step == 2


@cases(
    "error",
    [
        RuntimeError(f"the judge said: {failing_gpu.OUT_OF_MEMORY}"),
        RuntimeError("[save_safetensors] Failed to open checkpoint"),
        RuntimeError("cudaLaunchKernel failed: an illegal memory access was encountered"),
        RuntimeError("[metal::Device] Unable to build metal library from source"),
        ValueError(failing_gpu.OUT_OF_MEMORY),
        NotImplementedError(failing_gpu.OUT_OF_MEMORY),  # a RuntimeError too, which mlx does not raise
        UserError("save_every", failing_gpu.OUT_OF_MEMORY),
    ],
)
def test_nothing_else_is_a_gpu_error(error: Exception) -> None:
    assert gpu_error(error) is None
