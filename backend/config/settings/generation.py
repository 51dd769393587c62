"""How completions are sampled."""

from __future__ import annotations

from pydantic import BaseModel

from backend.config.setting import setting
from backend.config.settings.headings import SAMPLING
from backend.config.settings.limits import MOST_COMPLETIONS, MOST_TOKENS


class GenerationFields(BaseModel):
    """How completions are sampled: the fields of `backend.config.config.Config` about it."""

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
    repetition_penalty: float = setting(1.0, "generation", "Repetition penalty", "Divides the logit of every token of prompt and completion by "
                                        "this, or multiplies a negative one. Above 1 repeats less; 1 turns it off. Part of the policy: "
                                        "learning computes it too.", gt=0, le=10, advanced=True, group=SAMPLING)
    presence_penalty: float = setting(0.0, "generation", "Presence penalty", "Taken from the logit of every token that the completion has "
                                      "already. Above 0 repeats less; 0 turns it off. Part of the policy: learning computes it too.",
                                      ge=-10, le=10, advanced=True, group=SAMPLING)
    frequency_penalty: float = setting(0.0, "generation", "Frequency penalty", "Taken from the logit of a token as often as the completion "
                                       "has it. Above 0 repeats less; 0 turns it off. Part of the policy: learning computes it too.",
                                       ge=-10, le=10, advanced=True, group=SAMPLING)
    output_regex: str = setting("", "generation", "Output regex", "Holds every completion to this regular expression while it is sampled; it "
                                "may end only where the whole of it matches. Empty lets the model write freely.", kind="prose", advanced=True, group=SAMPLING)
    output_schema: str = setting("", "generation", "Output schema", "Holds every completion to JSON of this JSON schema, given as text or as a "
                                 "file. Empty lets the model write freely.", kind="prose", advanced=True, group=SAMPLING)
    # fmt: on
