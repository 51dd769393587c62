"""What a run may use of the machine, and what it records and leaves behind."""

from __future__ import annotations

from pydantic import BaseModel

from backend.config.setting import setting
from backend.config.settings.headings import MEMORY, REPORTS
from backend.config.settings.limits import MOST_TOKENS

_ADAPTERS = ("train_type", ("lora", "dora"))


class MachineFields(BaseModel):
    """What a run may use of the machine, and what it records and leaves behind: the fields of `backend.config.config.Config` about it."""

    # fmt: off
    grad_checkpoint: bool = setting(False, "training", "Gradient checkpointing", "Recomputes each layer in the backward "
                                    "pass: less memory, about a third slower.", used_by=("duration",), group=MEMORY)
    device: str = setting(
        "auto", "training", "Device", "What the run computes on.",
        choices=[("auto", "Automatic", "The GPU where MLX has one, else the CPU."), ("gpu", "GPU", "Refused where MLX has none."),
                 ("cpu", "CPU", "Much slower on a Mac; leaves its GPU free.")],
        advanced=True, used_by=("duration",), group=MEMORY,
    )
    memory_limit: float = setting(0.0, "training", "Memory limit", "What a run may use. Sampling and learning are cut up so that "
                                  "they stay within it. 0 takes a safe share of this machine.", ge=0, le=1_000_000, unit="GB", advanced=True, group=MEMORY)
    retry_on_gpu_error: int = setting(3, "training", "Retries after a GPU error", "How often in a row a run that the GPU has failed, for want "
                                      "of memory or because macOS stopped its work, goes on from its last step in a new process, each time "
                                      "with half the micro-batch. 0 never does.", ge=0, le=1_000, unit="times", advanced=True, group=MEMORY)
    relax_gpu_timeout: bool = setting(False, "training", "Relax GPU timeout", "Asks macOS to wait longer before it stops the GPU's work "
                                      "because the display waits (AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1). Apple does not document it, it does not "
                                      "always help, and the display may stutter. Only on a Mac.", advanced=True, group=MEMORY)
    efficient_long_context: bool = setting(False, "training", "Efficient long context", "Reads long prompts and works out "
                                           "log-probabilities piece by piece, in steps of the sequence step size.", advanced=True, group=MEMORY)
    seq_step_size: int = setting(512, "training", "Sequence step size", "Tokens per piece.", ge=16, le=MOST_TOKENS, unit="tokens",
                                 when=("efficient_long_context", (True,)), stays_visible=True, group=MEMORY)
    record_tokens: bool = setting(False, "training", "Record tokens", "Writes every token of a completion beside its text: its log-"
                                  "probability when it was sampled and when it was learned from, its ratio, and whether it was clipped. "
                                  "The Completions page colours tokens by them. Changes no weight; completions.jsonl grows about fivefold.",
                                  advanced=True, group=REPORTS)
    mask_prompt: bool = setting(True, "training", "Mask prompt", "Leaves the prompt's tokens out of the loss. GRPO never trains on the prompt: "
                                "it learns from what the model itself has written. On and off give the same run.",
                                note="GRPO never trains on the prompt: on or off, the run is the same.", known_as=("Mask prompt loss",), group=MEMORY)
    fuse: bool = setting(True, "training", "Fuse", "At the end, folds the adapters into a complete model in the run "
                         "folder.", when=_ADAPTERS, known_as=("Fuse merged model after training",), group=MEMORY)
    # fmt: on
