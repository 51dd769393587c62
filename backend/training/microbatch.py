"""Plans on plain lists which rows go through the model together: of rows sorted by length, runs with the fewest tokens,
padding and a pass's cost included (dynamic programming), largest first: the allocator's cache serves the rest."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

BUCKETS = 1, 32, 1 << 30  # tokens

PASS_OVERHEAD = 256  # cost of one more pass, in tokens


# prompts are read once in all, once per micro-batch, or once per row
PromptMode = Literal["prefilled", "per_micro_batch", "per_row"]


@dataclass(frozen=True, slots=True)
class RowLengths:
    """Index in the batch, group number, and lengths of prompt and completion in tokens."""

    index: int
    group: int
    prompt: int
    length: int


def plan_micro_batches(
    rows: Sequence[RowLengths],
    *,
    most_rows: int | None = None,
    token_budget: int | None = None,
    prompts: PromptMode = "per_micro_batch",
) -> list[list[int]]:
    """Row indices by micro-batch, largest first, each of at most `most_rows` rows and `token_budget` tokens with
    padding; a larger row goes alone."""
    # Prefilled for all micro-batches, a prompt costs none of them anything, wherever its rows are.
    if prompts == "prefilled":
        rows = [replace(row, prompt=0) for row in rows]
    elif prompts == "per_row":
        rows = [replace(row, prompt=0, length=row.prompt + row.length) for row in rows]

    def plan(bucket: int) -> list[MicroBatchRows]:
        # By group within a bucket of lengths, which keeps rows of one prompt together.
        order = sorted(rows, key=lambda row: (-(row.length // bucket), row.group, -row.length, row.index))
        return _cheapest_runs(order, most_rows, token_budget)

    # Where a prompt costs something for each micro-batch, wider buckets may save more of them than they pad.
    plans = map(plan, BUCKETS if prompts == "per_micro_batch" else BUCKETS[:1])
    cheapest = min(plans, key=lambda parts: sum(part.tokens + PASS_OVERHEAD for part in parts))
    return [[row.index for row in sorted(part.rows, key=lambda x: (x.group, x.index))] for part in cheapest]


class MicroBatchRows:
    """Rows that go through the model together; prompts are read once per group."""

    def __init__(self, rows: Sequence[RowLengths] = ()) -> None:
        self.rows = list[RowLengths]()
        self.groups = set[int]()
        self.longest = self.longest_prompt = 0
        for row in rows:
            self.add(row)

    @property
    def tokens(self) -> int:
        # Of two padded arrays, [rows, longest] and [groups, longest prompt].
        return len(self.rows) * self.longest + len(self.groups) * self.longest_prompt

    def add(self, row: RowLengths) -> None:
        self.rows.append(row)
        self.groups.add(row.group)
        self.longest = max(self.longest, row.length)
        self.longest_prompt = max(self.longest_prompt, row.prompt)


def _cheapest_runs(rows: Sequence[RowLengths], most_rows: int | None, token_budget: int | None) -> list[MicroBatchRows]:
    """Runs of consecutive rows within the limits, largest first. `best[i]`: of rows i… cost and runs."""
    best: list[tuple[float, list[MicroBatchRows]]] = [(0.0, [])] * (len(rows) + 1)
    for start in reversed(range(len(rows))):
        run, options = MicroBatchRows(), []
        for stop, row in enumerate(rows[start:], start + 1):
            run.add(row)
            too_many = most_rows is not None and len(run.rows) > most_rows
            if options and (too_many or (token_budget is not None and run.tokens > token_budget)):
                break
            options.append((run.tokens + PASS_OVERHEAD + best[stop][0], stop))
        cost, stop = min(options)  # ties by the nearer border, so the plan depends on the lengths alone
        best[start] = cost, [MicroBatchRows(rows[start:stop]), *best[stop][1]]
    return sorted(best[0][1], key=lambda part: -part.tokens)
