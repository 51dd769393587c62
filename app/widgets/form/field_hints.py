"""A few plain words beside the label of a setting whose label is terse. The labels are the field's usual words, and stay."""

from __future__ import annotations

HINTS: dict[str, str] = {
    "num_layers": "the last ones learn",
    "rank": "size of the adapter",
    "scale": "weight of the adapter",
    "dropout": "of the adapter",
    "dtype": "of the weights",
    "iters": "steps of training",
    "epochs": "instead of iterations",
    "batch_size": "questions a step",
    "gradient_accumulation_steps": "batches a step",
    "num_iterations": "from one sampling",
    "max_seq_length": "question and answer",
    "seed": "of all random numbers",
    "learning_rate": "size of an update",
    "lr_schedule": "rate over the run",
    "steps_per_report": "lines in the terminal",
    "steps_per_eval": "steps between tests",
    "save_every": "steps to a checkpoint",
    "val_batches": "in one evaluation",
    "test_batches": "after the run",
    "fuse": "a whole model at the end",
    "prompt_feature": "column of questions",
    "answer_feature": "column of solutions",
    "type_feature": "column of kinds",
    "system_feature": "column of system prompts",
    "beta": "0 is off",
    "group_size": "answers to a question",
    "max_completion_length": "of an answer, at most",
    "temperature": "how much answers vary",
    "top_p": "likeliest share only",
    "top_k": "likeliest only, 0 all",
    "min_p": "least share of the best",
    "epsilon": "clips what a step changes",
    "epsilon_high": "the same, upwards",
    "importance_sampling_level": "what the ratio is of",
    "advantage_baseline": "what counts as average",
}
"""Setting → the words."""
LONGEST = 26
"""Characters that fit beside a label in the narrowest column."""
