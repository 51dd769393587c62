"""Keep code that we do not trust to its own folder: no writing elsewhere, no network, no hold on other processes."""

from backend.rewards.confinement.confine import Confinement, confine
from backend.rewards.confinement.environment import confined_environment
from backend.rewards.confinement.guard import END_SIGNAL, guard
from backend.rewards.confinement.untrusted_program import confine_program, readable_by_programs, tell_children

__all__ = [
    "END_SIGNAL",
    "Confinement",
    "confine",
    "confine_program",
    "confined_environment",
    "guard",
    "readable_by_programs",
    "tell_children",
]
