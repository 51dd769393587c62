"""Self-distillation (SDPO, arXiv:2601.20802): the policy, shown a solved completion of the same prompt or feedback,
teaches itself. Texts, choice and loss follow TRL's SDPOTrainer in its mode `sampled_token`. With x′ the prompt
that the teacher reads:

    loss = mean over rows of the mean over tokens of
           sg(log π(y_t | x, y_<t) − log π_teacher(y_t | x′, y_<t)) · min(sg(π / π_old), 2) · log π(y_t | x, y_<t)

Rows without such a prompt add 0. One pass without gradient computes the teacher, before the step's updates.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from backend.config.config import Config
from backend.data.problems import (
    PromptFormat,
    TooLong,
    apply_chat_template,
    last_user_message,
    tokenize_if_fits,
    tokenizer_lock,
)
from backend.engine.output_layer import SplitModel
from backend.training.batch import Batch, ints, pack
from backend.training.losses import token_mean, token_weights
from backend.training.policy_forward import MicroBatch, PolicyForward
from backend.types import Completion, Group, Problem, content_text
from backend.utils.errors import UserError

REPROMPT = "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n"
SOLUTION = "\nCorrect solution:\n\n{text}\n\n"
FEEDBACK = "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{text}\n\n"
LARGEST_RATIO = 2.0


def add_teacher_prompts(
    groups: Sequence[Group], config: Config, tokenizer: Any, prompt_format: PromptFormat
) -> dict[str, float]:
    """Fill in `teacher_prompt` and `teacher_context` of every completion whose teacher sees something, unless both are
    longer than `max_seq_length`. Returns metrics. Raises UserError for a prompt that cannot be rendered again."""
    reprompted = too_long = solved_groups = 0
    for group in groups:
        rewards = [completion.reward for completion in group.completions]
        solved = [i for i, x in enumerate(rewards) if x is not None and x >= config.success_reward_threshold]
        solved_groups += bool(solved)
        prompts: dict[tuple[int | None, str], list[int] | TooLong] = {}
        for i, completion in enumerate(group.completions):
            solution = next((j for j in solved if j != i or not config.dont_reprompt_on_self_success), None)
            values = {**group.problem.row, **completion.columns, **completion.logged}
            value = values.get(config.privileged_context_feature) if config.include_environment_feedback else None
            feedback = value if isinstance(value, str) and value.strip() else ""
            if solution is None and not feedback:
                continue
            if (context := (solution, feedback)) not in prompts:
                with tokenizer_lock:
                    prompts[context] = _teacher_prompt(group, *context, config, tokenizer, prompt_format)
            tokens = prompts[context]
            if isinstance(tokens, TooLong) or len(tokens) + len(completion.tokens) > config.max_seq_length:
                too_long += 1
                continue
            reprompted += 1
            completion.teacher_prompt = tokens
            shown = {"solution_of": solution, "feedback": feedback}
            completion.teacher_context = {name: value for name, value in shown.items() if value not in (None, "")}
    count = sum(len(group.completions) for group in groups)
    return {
        "self_distillation/reprompted": reprompted / count,
        "self_distillation/solved_groups": solved_groups / len(groups),
        "self_distillation/too_long": too_long / count,
    }


def _teacher_prompt(
    group: Group, solution: int | None, feedback: str, config: Config, tokenizer: Any, prompt_format: PromptFormat
) -> list[int] | TooLong:
    problem = group.problem
    variables, row = prompt_format.variables_of(problem.row), f"the prompt of row {problem.index + 1}"
    messages, place = list(problem.messages), last_user_message(problem.messages)
    if place is None:
        why = f"Self-distillation writes into the last user message, and {row} has none."
        raise UserError("distillation_weight", why)
    if config.environment and apply_chat_template(messages, tokenizer, variables) != problem.tokens:
        why = f"Self-distillation needs one prompt for a group, and the environment began {row} in several ways."
        raise UserError("distillation_weight", why)
    solved = "" if solution is None else tokenizer.decode(group.completions[solution].tokens, skip_special_tokens=True)
    text = REPROMPT.format(
        prompt=content_text(content := messages[place]["content"]),
        solution="" if solution is None else SOLUTION.format(text=solved),
        feedback=feedback and FEEDBACK.format(text=feedback),
    )
    images = [] if isinstance(content, str) else [part for part in content if part["type"] == "image"]
    messages[place] = {**messages[place], "content": [*images, {"type": "text", "text": text}] if images else text}
    return tokenize_if_fits(messages, tokenizer, variables, f"the teacher's version of {row}", config.max_seq_length)


def teacher_weights(batch: Batch) -> mx.array:
    """Weight of each token in the distillation loss, [B, T]: rows count alike, and those without a teacher too."""
    has_teacher_B1 = mx.array([[float(bool(batch.teacher_prompts[row]))] for row in ints(batch.row_B)])
    return token_weights(batch.mask_BT, loss_type="grpo") * has_teacher_B1


def set_teacher_logps(micro_batches: Sequence[MicroBatch], teacher: SplitModel, forward: PolicyForward) -> None:
    """Set `teacher_logp_BT`, log π_teacher in nats, 0 in rows without a teacher. Rows of one prompt share it."""
    rows_of: dict[tuple[int, ...], list[tuple[int, int, Completion]]] = {}
    logps = [np.zeros(part.batch.mask_BT.shape, np.float32) for part in micro_batches]
    for number, batch in enumerate(part.batch for part in micro_batches):
        columns: list[Any] = [x.tolist() for x in (batch.row_B, batch.length_B, batch.completion_BT, batch.mask_BT)]
        for i, (row, length, tokens, mask) in enumerate(zip(*columns, strict=True)):
            if prompt := batch.teacher_prompts[row]:
                own = Completion(tokens[:length], [0.0] * length, "", "eos", mask=mask[:length])
                rows_of.setdefault(tuple(prompt), []).append((number, i, own))
    groups = [Group(Problem(0, "", [], [*prompt], ""), [own for *_, own in rows]) for prompt, rows in rows_of.items()]
    places = [(number, i) for rows in rows_of.values() for number, i, _ in rows]
    # One micro-batch at a time, so that no more prompts are in memory than fit its tokens: there may be one a row.
    mode = "per_micro_batch" if teacher.prefix_layers else "per_row"
    for part in pack(groups, pad_id=0).micro_batches(token_budget=forward.micro_batch_tokens, prompts=mode):
        (logp_BT,) = forward.logps_without_gradient(teacher, [MicroBatch.of(part)])
        for row, logp_T in zip(ints(part.row_B), np.array(logp_BT), strict=True):
            number, i = places[row]
            logps[number][i, : len(logp_T)] = logp_T[: logps[number].shape[1]]
    for part, logp_BT in zip(micro_batches, logps, strict=True):
        part.set_arrays(teacher_logp_BT=mx.array(logp_BT))


def distillation_terms(logp_BT: mx.array, batch: Batch) -> tuple[mx.array, mx.array]:
    """One micro-batch's share of the loss, and [numerator, denominator] of its token mean. `logp_BT`: in nats."""
    assert batch.teacher_logp_BT is not None and batch.teacher_weight_BT is not None
    now_BT = mx.stop_gradient(logp_BT)
    log_ratio_BT = mx.zeros_like(now_BT) if batch.old_logp_BT is None else now_BT - batch.old_logp_BT
    ratio_BT = mx.minimum(mx.exp(mx.clip(log_ratio_BT, -20.0, 20.0)), LARGEST_RATIO)
    term_BT = (now_BT - batch.teacher_logp_BT) * ratio_BT * logp_BT
    return (term_BT * batch.teacher_weight_BT).sum(), token_mean(term_BT, batch.teacher_weight_BT > 0)
