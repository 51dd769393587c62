"""How completions are sampled."""

from __future__ import annotations

from pydantic import BaseModel

from backend.spec.checks import MOST_COMPLETIONS
from backend.spec.setting import setting
from backend.spec.settings.limits import MOST_TOKENS


class GenerationFields(BaseModel):
    """How completions are sampled: the fields of `backend.spec.config.Config` about it."""

    # fmt: off
    group_size: int = setting(4, "generation", "Group", "Completions sampled for each prompt and compared with one "
                              "another. More give a steadier signal and cost more.", ge=2, le=MOST_COMPLETIONS, unit="completions")
    max_completion_length: int = setting(512, "generation", "Completion", "Longest completion.", ge=1, le=MOST_TOKENS, unit="tokens",
                                         used_by=("prompt_limit", "scoring", "duration"))
    temperature: float = setting(0.8, "generation", "Temp", "How freely tokens are drawn; log-probabilities are taken at "
                                 "the same temperature. 0 is invalid: a group would be one answer many times.", gt=0, le=10)
    top_p: float = setting(0.95, "generation", "Top P", "Draws only from the likeliest tokens that make up this share. 1 "
                           "turns it off.", gt=0, le=1)
    top_k: int = setting(20, "generation", "Top K", "Draws only from this many likeliest tokens. 0 turns it off.", ge=0, le=10_000_000, unit="tokens")
    min_p: float = setting(0.0, "generation", "Min P", "Drops tokens below this share of the likeliest one. 0 turns it off.", ge=0, le=1)
    # fmt: on
