"""What the system and the user's shell set for a process, where no verb could work with it."""

from __future__ import annotations

from backend.utils.hub_cache import require_hub_address
from backend.utils.machine import require_address_space


def require_environment() -> None:
    """Raises UserError for an HF_ENDPOINT that is no address, and for too little address space."""
    require_hub_address()
    require_address_space()
