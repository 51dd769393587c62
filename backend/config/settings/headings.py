"""The headings within a block of the form. A setting names its heading as its `group`; `ORDER` is the order in which they stand."""

from __future__ import annotations

LORA = "LoRA Settings"
WEIGHTS = "Weights"

STEPS = "Steps and batches"
LEARNING = "Learning rate and optimizer"
REPORTS = "Evaluation and checkpoints"
MEMORY = "Memory, test and fusing"
BEST = "Early stopping"
MACHINES = "Machines"

COLUMNS = "Columns"
PROMPTS = "Prompts"
ANSWERS = "Answers"
ROWS = "Rows and splits"
HELD_OUT = "Held-out prompts"

SAMPLING = "Sampling"
LOSS = "Loss"
ENTROPY = "Entropy"
ADVANTAGES = "Advantages"
COURSE = "Rewards over the run"
REWARD_LIMITS = "Limits of reward functions"

ORDER = (
    "",  # settings without a heading stand above the first
    *(LORA, WEIGHTS),
    *(STEPS, LEARNING, REPORTS, MEMORY, BEST, MACHINES),
    *(COLUMNS, PROMPTS, ANSWERS, ROWS, HELD_OUT),
    *(SAMPLING, LOSS, ENTROPY, ADVANTAGES, COURSE, REWARD_LIMITS),
)
"""Block after block."""
