"""The loss: clipping, weighting, corrections and advantages (`backend.training.losses`)."""

from __future__ import annotations

from pydantic import BaseModel

from backend.config.loss_menu import levels, losses
from backend.config.setting import setting
from backend.config.settings.headings import ADVANTAGES, ENTROPY, LOSS

_SAPO, _VESPO = ("grpo_loss_type", ("sapo",)), ("grpo_loss_type", ("vespo",))
_CORRECTED = ("sampling_correction", ("auto", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"))


class ObjectiveFields(BaseModel):
    """The loss: clipping, weighting, corrections and advantages (`backend.training.losses`): the fields of `backend.config.config.Config` about it."""

    # fmt: off
    epsilon: float = setting(1e-4, "generation", "Epsilon", "How far below 1 the ratio may fall before its gradient stops.", gt=0, lt=1)
    epsilon_high: float | None = setting(None, "generation", "Epsilon high", "How far above 1 the ratio may rise. Empty "
                                         "means the same as Epsilon; DAPO sets it higher.", gt=0, le=1_000_000)
    grpo_loss_type: str = setting(
        "grpo", "generation", "GRPO Loss", "How the tokens' losses are averaged. GRPO is the paper's and TRL's mean; the mean over all tokens, "
        "which MLX LoRA Studio's guide gives for it, is BNPO.",
        choices=[(entry.key, entry.name, entry.sentence) for entry in losses()],
    )
    importance_sampling_level: str = setting(
        "token", "generation", "Importance", "Whether the ratio is taken for each token or for the whole completion.",
        choices=[(entry.key, entry.name, entry.sentence) for entry in levels()], default_entry="Default",
    )
    delta: float | None = setting(None, "generation", "Delta", "Largest ratio that is left alone where nothing else clips it "
                                  "(two-sided clipping, INTELLECT-2). Empty turns it off.", gt=1, le=1_000_000, advanced=True, group=LOSS)
    sapo_temperature_pos: float = setting(1.0, "generation", "SAPO temperature, better", "How sharply the gate closes for "
                                          "completions above their group's mean.", gt=0, le=1_000_000, advanced=True, when=_SAPO, group=LOSS)
    sapo_temperature_neg: float = setting(1.05, "generation", "SAPO temperature, worse", "The same for completions below it.",
                                          gt=0, le=1_000_000, advanced=True, when=_SAPO, group=LOSS)
    vespo_k_pos: float = setting(2.0, "generation", "VESPO k, better", "Power of the ratio in the weight of completions "
                                 "above their group's mean.", gt=0, le=1_000_000, advanced=True, when=_VESPO, group=LOSS)
    vespo_lambda_pos: float = setting(3.0, "generation", "VESPO lambda, better", "How fast that weight falls off.", gt=0, le=1_000_000,
                                      advanced=True, when=_VESPO, group=LOSS)
    vespo_k_neg: float = setting(3.0, "generation", "VESPO k, worse", "The power for completions below it.", gt=0, le=1_000_000,
                                 advanced=True, when=_VESPO, group=LOSS)
    vespo_lambda_neg: float = setting(2.0, "generation", "VESPO lambda, worse", "How fast that weight falls off.", gt=0, le=1_000_000,
                                      advanced=True, when=_VESPO, group=LOSS)
    top_entropy_quantile: float = setting(1.0, "generation", "Entropy share", "Share of the tokens, the most uncertain ones, "
                                          "that carry the policy term. 1 takes all.", ge=0, le=1, advanced=True, group=ENTROPY)
    entropy_coef: float = setting(0.0, "generation", "Entropy bonus", "Rewards uncertainty itself, against collapse. 0 turns "
                                  "it off.", ge=0, le=1, advanced=True, group=ENTROPY)
    entropy_adaptive: bool = setting(False, "generation", "Adaptive entropy bonus", "Moves the bonus by 0.005 after each update, "
                                     "up while the entropy is at or below the target, else down.", advanced=True, group=ENTROPY)
    entropy_target: float = setting(0.2, "generation", "Entropy target", "The entropy that the adaptive bonus holds.", ge=0, le=100,
                                    unit="nats", advanced=True, when=("entropy_adaptive", (True,)), group=ENTROPY)
    off_policy_mask_threshold: float | None = setting(None, "generation", "Off-policy mask", "Leaves out worse-than-average "
                                                      "completions that have drifted further than this. Empty leaves none out.",
                                                      gt=0, le=1_000_000, unit="nats a token", advanced=True, group=LOSS)
    mask_truncated_completions: bool = setting(False, "generation", "Mask truncated completions", "Does not train on completions "
                                               "that ran into the length limit; their reward still counts in the group.", advanced=True, group=LOSS)
    sampling_correction: str = setting(
        "auto", "generation", "Sampling correction", "What to do about the gap between the policy and what was drawn from: a model "
        "in 16 bits rounds differently in sampling and in learning, and top-p, top-k and min-p cut the distribution. The gap is "
        "measured in any case.", advanced=True,
        choices=[("auto", "Automatic", "Sequence, truncated where output is held; else token, truncated in 16 bits and none in 32."),
                 ("none", "None", "Leave it."),
                 ("token_truncate", "Token, truncated", "Multiply each token's term by the ratio, held within the limits (TIS)."),
                 ("token_mask", "Token, masked", "The same, with tokens outside the limits left out (MIS)."),
                 ("sequence_truncate", "Sequence, truncated", "One ratio a completion, held within the limits."),
                 ("sequence_mask", "Sequence, masked", "One ratio a completion; outside the limits it is left out.")], group=LOSS,
    )
    sampling_correction_max: float | None = setting(3.0, "generation", "Largest correction", "Upper limit of the ratio. Empty "
                                                    "means none.", gt=0, le=1_000_000, advanced=True, when=_CORRECTED, group=LOSS)
    sampling_correction_min: float | None = setting(None, "generation", "Smallest correction", "Lower limit of the ratio. Empty "
                                                    "means none.", gt=0, le=1_000_000, advanced=True, when=_CORRECTED, group=LOSS)
    scale_rewards: str = setting(
        "group", "generation", "Scale rewards", "What the distance from the group's mean is divided by.", advanced=True,
        choices=[("group", "Group", "The standard deviation of the group."),
                 ("batch", "Batch", "The standard deviation of the whole batch."),
                 ("none", "None", "Nothing, as in Dr. GRPO.")],
        used_by=("scoring",), group=ADVANTAGES,
    )
    advantage_baseline: str = setting(
        "group", "generation", "Baseline", "What a completion's reward is compared with.", advanced=True,
        choices=[("group", "Group mean", "The mean of the whole group, as in GRPO."),
                 ("leave_one_out", "Leave one out", "The mean of the other completions of the group (RLOO).")],
        used_by=("scoring",), group=ADVANTAGES,
    )
    multi_objective_aggregation: str = setting(
        "sum_then_normalize", "generation", "Several rewards", "How several reward functions become one advantage.", advanced=True,
        choices=[("sum_then_normalize", "Sum, then normalise", "Weigh and add the scores, then compare."),
                 ("normalize_then_sum", "Normalise, then sum", "Compare each score by itself first, so that no function drowns "
                  "another (GDPO). Scale rewards is not used.")],
        used_by=("scoring",), group=ADVANTAGES,
    )
    skip_zero_signal: bool = setting(True, "generation", "Skip groups without signal", "Does no forward and backward pass for "
                                     "completions that cannot move the policy. Changes no gradient.", advanced=True, group=ADVANTAGES)
    dynamic_sampling: bool = setting(False, "generation", "Dynamic sampling", "Draws on, prompt after prompt, until every group of "
                                     "the step has completions of different reward (DAPO).", advanced=True, group=ADVANTAGES)
    dynamic_sampling_rounds: int = setting(10, "generation", "Rounds at most", "How often a step may draw before it goes on with what "
                                           "it has.", ge=1, le=10_000, unit="rounds", advanced=True, when=("dynamic_sampling", (True,)), group=ADVANTAGES)
    # fmt: on
