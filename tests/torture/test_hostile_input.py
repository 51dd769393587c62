"""A sample of the hostile datasets: `python -m tests.torture datasets` tries tens of thousands."""

from __future__ import annotations

from tests.torture import datasets


def test_hostile_datasets() -> None:
    assert datasets.main(150, 0) == 0
