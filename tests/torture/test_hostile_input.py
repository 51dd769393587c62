"""A sample of the hostile datasets and model folders: `python -m tests.torture datasets` and `models` try tens of thousands."""

from __future__ import annotations

from tests.torture import datasets, models


def test_hostile_datasets() -> None:
    assert datasets.main(150, 0) == 0


def test_hostile_model_folders() -> None:
    assert models.main(8, 100) == 0
