"""Sampling, loss, advantages and rewards."""

import ast
from functools import partial
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from backend.config.setting import MOST_COMPLETIONS, MOST_TOKENS, NEVER, setting
from backend.rewards.catalogue import DEFAULT_REWARDS

_preference = partial(setting, section="preference", part="policy")
_advanced_preference = partial(_preference, advanced=True)
_generation = partial(setting, section="generation", part="sampling")
_sampling = partial(_generation, group="Sampling", advanced=True)
_policy = partial(setting, section="generation", part="policy")
_loss = partial(_policy, group="Loss", advanced=True)
_distillation = partial(setting, section="generation", group="Self-distillation", advanced=True)
_self_distillation = partial(_distillation, when=("train_mode", ("grpo",)))
_entropy = partial(_policy, group="Entropy", advanced=True)
_advantages = partial(_policy, group="Advantages", advanced=True)
_rewards = partial(setting, section="generation", part="scoring")
_course = partial(_rewards, group="Rewards over the run", advanced=True)
_reward_limits = partial(_rewards, group="Limits of reward functions", advanced=True)
_tools = partial(_generation, group="Tools and environments", used_by=("tools", "row_view"))
_sapo = partial(_loss, above=(0, 1_000_000), when=("grpo_loss_type", ("sapo",)))
_vespo = partial(_loss, above=(0, 1_000_000), when=("grpo_loss_type", ("vespo",)))
_CORRECTED = ("sampling_correction", ("auto", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"))


def _menus() -> dict[str, list[tuple[Any, ...]]]:
    """The tables of `backend/training/losses.py`, read as text: menus need no mlx."""
    menus: dict[str, list[tuple[Any, ...]]] = {}
    file = Path(__file__).parents[2] / "training" / "losses.py"
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        match node:
            case ast.AnnAssign(
                target=ast.Name(id="LOSSES" | "LEVELS" | "KL_ESTIMATORS" as table),
                value=ast.Dict(keys=keys, values=rows),
            ):
                for key, row in zip(keys, rows, strict=True):
                    words = {str(word.arg): word.value for word in cast("ast.Call", row).keywords}
                    name, sentence, paper = (ast.literal_eval(words[word]) for word in ("name", "sentence", "paper"))
                    value = ast.literal_eval(cast("ast.expr", key))
                    menus.setdefault(table, []).append((value, name, sentence, False, paper))
    return menus


_MENUS = _menus()


class GrpoFields(BaseModel):
    """Sampling, loss, advantages and rewards."""

    beta: float = _preference(0.1, "Beta (KL weight)", within=(0, 1_000_000), known_as=("Beta", "KL weight"))
    """KL penalty that keeps the model near the reference. 0 turns it off; then only Log KL measures the KL, at the
    price of a reference pass."""
    reference_model_path: str = _preference(
        "", "Reference model path", kind="model", known_as=("Reference model",), used_by=("task",)
    )
    """Model to stay near. Empty: the base model before training, which needs no second copy with LoRA."""
    sync_ref_model: bool = _advanced_preference(False, "Reference follows")
    """Moves the reference towards the policy from time to time."""
    ref_model_mixup_alpha: float = _advanced_preference(0.6, "Mix-up", above=(0, 1), when=("sync_ref_model", (True,)))
    """Share of the policy in the new reference."""
    ref_model_sync_steps: int = _advanced_preference(
        512, "Sync every", within=(1, NEVER, "updates"), when=("sync_ref_model", (True,))
    )
    """Updates between two moves of the reference."""
    log_kl: bool = _advanced_preference(False, "Log KL at weight 0", when=("beta", (0, 0.0)))
    """Measures the KL for the charts at KL weight 0. Costs a reference pass."""
    kl_estimator: str = _advanced_preference("k3", "KL estimator", *_MENUS["KL_ESTIMATORS"])
    """Formula of the KL term per token. The default works; the other is the documented formula, to the letter."""
    use_bias_correction_kl: bool = _advanced_preference(True, "Bias-corrected KL", when=("kl_estimator", ("k3",)))
    """Multiplies the KL estimate by the ratio, which corrects its gradient off-policy (TRL's default)."""
    ratio_against: str = _advanced_preference(
        "old",
        "Ratio against",
        ("old", "Policy that sampled", "As in the papers and TRL."),
        ("reference", "Reference model", "As in MLX LoRA Studio: learning stops once the policy is Epsilon away."),
    )
    """Denominator of the importance ratio."""
    group_size: int = _generation(4, "Group", within=(1, MOST_COMPLETIONS, "completions"), used_by=("scoring",))
    """Completions sampled per prompt and compared with each other. More give a steadier signal and cost more."""
    max_completion_length: int = _generation(
        512, "Completion", within=(1, MOST_TOKENS, "tokens"), used_by=("prompt_limit", "scoring", "duration")
    )
    """Longest completion."""
    temperature: float = _generation(0.8, "Temp", above=(0, 10))
    """Randomness of sampling; log-probabilities use the same temperature. 0 is invalid: all completions would be
    equal."""
    top_p: float = _generation(0.95, "Top P", above=(0, 1))
    """Samples from the likeliest tokens that make up this share. 1: off."""
    top_k: int = _generation(20, "Top K", within=(0, MOST_TOKENS, "tokens"))
    """Samples from this many likeliest tokens. 0: off."""
    min_p: float = _generation(0.0, "Min P", within=(0, 1))
    """Drops tokens below this share of the likeliest one. 0: off."""
    repetition_penalty: float = _sampling(1.0, "Repetition penalty", above=(0, 10))
    """Divides the logits of tokens that prompt or completion contain (negative ones are multiplied). Part of the
    policy; 1: off."""
    presence_penalty: float = _sampling(0.0, "Presence penalty", within=(-10, 10))
    """Subtracted from the logit of every token that the completion contains. Part of the policy; 0: off."""
    frequency_penalty: float = _sampling(0.0, "Frequency penalty", within=(-10, 10))
    """Subtracted from a token's logit once per occurrence in the completion. Part of the policy; 0: off."""
    output_regex: str = _sampling("", "Output regex", kind="prose")
    """Constrains completions to this regular expression; a completion may end only at a full match. Empty: free
    text."""
    output_schema: str = _sampling("", "Output schema", kind="prose")
    """Constrains completions to JSON of this JSON schema, as text or a file. Empty: free text."""
    use_speculative_decoding: bool = _sampling(False, "Speculative decoding")
    """Drafts the next tokens of the last few completions of a step and checks them together. Tokens stay the same; used
    only while it is faster."""
    draft_model_path: str = _sampling("", "Draft model", kind="model", when=("use_speculative_decoding", (True,)))
    """Small model with the same tokenizer that drafts. Empty: what followed the same words in the prompt and in its
    other completions."""
    rollout_quantization: str = _sampling(
        "none",
        "Rollout quantization",
        ("none", "None", "Sample from the model as it is trained."),
        ("8", "8-bit", "Half the bytes of 16 bits, nearly the same probabilities."),
        ("4", "4-bit", "A quarter of the bytes, and a gap that the sampling correction has to weigh."),
    )
    """Samples from a copy of the base in fewer bits, with the same adapters: a token reads fewer bytes. Learning and
    evaluations keep the exact model; Sampling correction weighs the difference."""
    epsilon: float = _policy(1e-4, "Epsilon", between=(0, 1))
    """Clip range below 1: how far the ratio may fall."""
    epsilon_high: float | None = _policy(None, "Epsilon high", above=(0, 1_000_000))
    """Clip range above 1. Empty: as Epsilon; DAPO sets it higher."""
    grpo_loss_type: str = _policy("grpo", "GRPO Loss", *_MENUS["LOSSES"])
    """How token losses are averaged. GRPO is the mean of the paper and of TRL; the mean over all tokens in MLX LoRA
    Studio's guide is BNPO."""
    importance_sampling_level: str = _policy("token", "Importance", *_MENUS["LEVELS"], default_entry="Default")
    """Whether the ratio is taken for each token or for the whole completion."""
    delta: float | None = _loss(None, "Delta", above=(1, 1_000_000))
    """Upper bound of the ratio where nothing else clips it (two-sided clipping, INTELLECT-2). Empty: off."""
    sapo_temperature_pos: float = _sapo(1.0, "SAPO temperature, better")
    """Sharpness of the gate for completions above the group's mean."""
    sapo_temperature_neg: float = _sapo(1.05, "SAPO temperature, worse")
    """Sharpness of the gate for completions below the group's mean."""
    vespo_k_pos: float = _vespo(2.0, "VESPO k, better")
    """Exponent of the ratio for completions above the group's mean."""
    vespo_lambda_pos: float = _vespo(3.0, "VESPO lambda, better")
    """Decay of the weight for completions above the group's mean."""
    vespo_k_neg: float = _vespo(3.0, "VESPO k, worse")
    """Exponent of the ratio for completions below the group's mean."""
    vespo_lambda_neg: float = _vespo(2.0, "VESPO lambda, worse")
    """Decay of the weight for completions below the group's mean."""
    top_entropy_quantile: float = _entropy(1.0, "Entropy share", within=(0, 1))
    """Share of the most uncertain tokens that the policy term uses. 1: all."""
    entropy_coef: float = _entropy(0.0, "Entropy bonus", within=(0, 1))
    """Bonus for entropy, against collapse. 0: off."""
    entropy_adaptive: bool = _entropy(False, "Adaptive entropy bonus")
    """Moves the bonus by 0.005 after each update: up at or below the target entropy, else down."""
    entropy_target: float = _entropy(0.2, "Entropy target", within=(0, 100, "nats"), when=("entropy_adaptive", (True,)))
    """Target entropy of the adaptive bonus, of the tokens that it acts on."""
    off_policy_mask_threshold: float | None = _loss(None, "Off-policy mask", above=(0, 1_000_000, "nats a token"))
    """Skips worse-than-average completions that drifted further than this. Empty: none."""
    mask_truncated_completions: bool = _loss(False, "Mask truncated completions")
    """Does not train on completions cut at the length limit; their reward still counts in the group."""
    sampling_correction: str = _loss(
        "auto",
        "Sampling correction",
        ("auto", "Automatic", "Rounding, by token in 16 bits; constrained output, by sequence. Not filters."),
        ("none", "None", "Leave it."),
        ("token_truncate", "Token, truncated", "Each token's term times the ratio, clipped to the limits (TIS)."),
        ("token_mask", "Token, masked", "The same, without tokens outside the limits (MIS)."),
        ("sequence_truncate", "Sequence, truncated", "One ratio per completion, clipped to the limits."),
        ("sequence_mask", "Sequence, masked", "One ratio per completion; drops completions outside the limits."),
    )
    """Corrects the gap between sampling and learning: 16-bit rounding and, unless automatic, tokens cut by top-p, top-k
    and min-p."""
    sampling_correction_max: float | None = _loss(3.0, "Largest correction", above=(0, 1_000_000), when=_CORRECTED)
    """Upper limit of the ratio. Empty: none."""
    sampling_correction_min: float | None = _loss(None, "Smallest correction", above=(0, 1_000_000), when=_CORRECTED)
    """Lower limit of the ratio. Empty: none."""
    distillation_weight: float | None = _distillation(
        None, "Distillation weight", within=(0, 1), when=("train_mode", ("grpo", "distill"))
    )
    """Share of the loss that is distillation; the rest is the policy term. Under GRPO (empty: 0, off) the policy is its
    own teacher: shown a solved completion of the same prompt, it scores the tokens of the others (SDPO). Under
    Distillation empty is 1."""
    distillation_beta: float = _generation(1.0, "Divergence beta", within=(0, 1), when=("train_mode", ("distill",)))
    """Which divergence from the teacher is made small: 0 is the forward KL, which covers all that the teacher would
    write; 1 the reverse KL, which keeps to what it likes best; between them the generalised JSD."""
    success_reward_threshold: float = _distillation(
        1.0, "Solved from", within=(-1_000_000, 1_000_000), part="scoring", used_by=("scoring",)
    )
    """Reward from which a completion counts as solved."""
    dont_reprompt_on_self_success: bool = _self_distillation(True, "Solutions of others only")
    """Never shows the teacher the completion that it scores."""
    include_environment_feedback: bool = _self_distillation(False, "Show feedback")
    """Shows the teacher a text about the completion or its prompt too, from the feedback column or logged by a reward
    function under its name."""
    privileged_context_feature: str = _distillation(
        "privileged_context", "Feedback column", when=("include_environment_feedback", (True,))
    )
    """Column with feedback, or a hint that only the teacher reads."""
    teacher_model_kind: str = _self_distillation(
        "live",
        "Teacher",
        ("live", "Policy", "The policy before the step's updates."),
        ("base", "Reference", "The reference model: the base model before training, unless it follows."),
    )
    """Which weights teach."""
    scale_rewards: str = _advantages(
        "group",
        "Scale rewards",
        ("group", "Group", "The standard deviation of the group."),
        ("batch", "Batch", "The standard deviation of the whole batch."),
        ("none", "None", "Nothing, as in Dr. GRPO."),
        used_by=("scoring",),
    )
    """Divisor of the distance from the group's mean."""
    advantage_baseline: str = _advantages(
        "group",
        "Baseline",
        ("group", "Group mean", "The mean of the whole group, as in GRPO."),
        ("leave_one_out", "Leave one out", "The mean of the other completions of the group (RLOO)."),
        used_by=("scoring",),
    )
    """What a completion's reward is compared with."""
    multi_objective_aggregation: str = _advantages(
        "sum_then_normalize",
        "Several rewards",
        ("sum_then_normalize", "Sum, then normalise", "Adds the weighted scores, then compares."),
        ("normalize_then_sum", "Normalise, then sum", "Compares each score first (GDPO), without Scale rewards."),
        used_by=("scoring",),
    )
    """How several reward functions become one advantage."""
    skip_zero_signal: bool = _advantages(True, "Skip groups without signal")
    """Skips passes for completions that cannot move the policy. Changes no gradient."""
    dynamic_sampling: bool = _advantages(False, "Dynamic sampling")
    """Samples more prompts until every group of the step has different rewards (DAPO)."""
    dynamic_sampling_rounds: int = _advantages(
        10, "Rounds at most", within=(1, 10_000, "rounds"), when=("dynamic_sampling", (True,))
    )
    """Sampling rounds per step before it continues with what it has."""
    prompt_selection: str = _advantages(
        "shuffled",
        "Prompt selection",
        ("shuffled", "Shuffled", "Every prompt once an epoch."),
        ("pass_rate", "By pass rate", "More often those that the model solves sometimes: groups with a signal."),
    )
    """How the prompts of a step are chosen. By pass rate saves completions where many prompts are always or never
    solved (Solved from)."""
    selection_uniform_share: float = _advantages(
        0.2, "Drawn uniformly", within=(0, 1), when=("prompt_selection", ("pass_rate",))
    )
    """Share of the prompts that are drawn from all rows alike, so that pass rates stay known."""
    reward_functions: list[str] = _rewards(
        list(DEFAULT_REWARDS),
        "Custom reward function names",
        kind="rewards",
        empty_is_default=True,
        known_as=("Default Reward Functions", "Reward functions", "Use All Defaults"),
        used_by=("task", "row_view", "rewards", "scoring"),
    )
    """Functions that score a completion, in order, separated by commas. Empty: the five defaults; none with an
    environment, whose get_reward scores."""
    reward_weights: list[float] = _rewards([], "Reward weights", kind="numbers", used_by=("task", "rewards", "scoring"))
    """One number per function. Empty: 1 for each."""
    reward_functions_file: str = _rewards(
        "",
        "Reward functions Python file",
        kind="file",
        known_as=("Reward functions file",),
        used_by=("task", "rewards", "scoring"),
    )
    """A Python file (.py or .txt) that registers your own functions."""
    reward_weight_schedule: str = _course(
        "constant",
        "Weight schedule",
        ("constant", "Constant", "The weights as they stand."),
        ("linear", "Linear", "Along a line to the final weights."),
        ("adaptive", "Adaptive", "Functions that seldom succeed gain weight; those that always do lose some."),
        used_by=("rewards",),
    )
    """Whether the weights change over the run."""
    reward_weights_final: list[float] = _course(
        [], "Final weights", kind="numbers", when=("reward_weight_schedule", ("linear",)), used_by=("rewards",)
    )
    """Weights at the last step, one per function."""
    stages: list[dict[str, Any]] = _course([], "Stages", kind="stages")
    """Parts of the run in sequence, each with iters and its own settings, such as reward_functions, data,
    learning_rate or group_size. Together they set the length of the run."""
    reward_timeout: float = _reward_limits(
        60.0, "Reward timeout", above=(0, 1_000_000, "s"), used_by=("rewards", "scoring")
    )
    """A reward function that takes longer than this in one step stops the run."""
    reward_isolation: str = _reward_limits(
        "process",
        "Reward isolation",
        (
            "process",
            "Own process",
            "Without the trainer's files and environment. A crash or hang costs one message, and the run is saved.",
        ),
        ("thread", "In the trainer", "For functions that need its memory. A crash or hang ends the run."),
        used_by=("rewards",),
    )
    """Where reward functions run."""
    reward_network: bool = _reward_limits(
        False, "Reward network", when=("reward_isolation", ("process",)), used_by=("rewards", "scoring")
    )
    """Reward functions may use the network, for example to ask a judge."""
    tools_file: str = _tools("", "Tools file", kind="file")
    """A Python file with functions that the model may call. Each needs type hints and a docstring with an Args
    section: the model reads them."""
    environment: str | dict[str, str] = _tools("", "Environment", kind="text")
    """A class, as file.py::Class. Every completion gets an instance, its public methods are tools, and a get_reward
    method scores it. Or openenv:FOLDER. Several: a mapping of names to these."""
    environment_column: str = _tools("environment", "Environment column", advanced=True)
    """Column that names each row's environment where there are several."""
    mcp_servers: dict[str, Any] = _tools({}, "MCP servers")
    """Servers whose tools the model may call: a name, then command and args, or the url of one on this machine."""
    tools: list[str] = _tools([], "Tools")
    """Names of the functions of the tools file that the model may call. Empty: all public ones."""
    max_tool_calling_iterations: int = _tools(8, "Tool turns", within=(1, 1000), advanced=True)
    """Turns with tool calls in one completion; after them the next call is not run."""
    tool_timeout: float = _tools(10.0, "Tool timeout", above=(0, 1_000_000, "s"), advanced=True)
    """A call that takes longer ends with an error that the model reads."""
