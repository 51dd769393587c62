"""Two threads of the window's helper need mlx-lm at once: a tokenizer for the dataset's preview, the model for a
sample."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = {
    "mlx_lm/__init__.py": "import time\ntime.sleep(0.3)\nfrom .generate import GENERATE\n",
    "mlx_lm/generate.py": "from .models.cache import CACHE\nGENERATE = CACHE\n",
    "mlx_lm/models/__init__.py": "",
    "mlx_lm/models/cache.py": "CACHE = 1\n",
    "handlers.py": "from mlx_lm.models.cache import CACHE\nsample = lambda request, call: CACHE\n",
}
"""mlx-lm in small: a package that imports its parts, and a handler that imports one of them."""
SCRIPT = """
import threading, time
from backend.models.tokenizers import import_mlx_lm
from backend.serve.questions import Question

tokenizer = threading.Thread(target=import_mlx_lm)
tokenizer.start()
time.sleep(0.1)
print(Question("handlers:sample", pool="model").handler()({}, None))
tokenizer.join()
"""


def test_sampling_while_a_tokenizer_is_loaded_for_the_first_time(tmp_path: Path) -> None:
    """On a busy machine the first click on Sample ended in “deadlock detected by _ModuleLock”."""
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    script = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n{SCRIPT}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("1", "")
