"""Labelled rows: prompt and completion, or a chat whose assistant's turns are imitated."""

from __future__ import annotations

from dataclasses import replace

from backend.types import Completion, Group, Problem


def labelled_group(problem: Problem) -> Group:
    """The row's label as the only completion of its prompt, which ends before the first token to imitate."""
    assert problem.label is not None
    ids, mask = problem.label.tokens, problem.label.mask
    start = mask.index(1)
    stop = "length" if problem.label.is_cut else "eos"
    completion = Completion(ids[start:], [0.0] * (len(ids) - start), "", stop, mask=mask[start:])
    return Group(replace(problem, tokens=ids[:start]), [completion])
