# For pyright, in place of transformers: its 3,000 modules would take a third of the time and tell nothing.
from typing import Any

def __getattr__(name: str) -> Any: ...
