"""Sizes as people read them."""

from __future__ import annotations

import pytest

from backend.utils.disk_faults import gigabytes


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 kB"), (999_400, "999 kB"), (999_500, "1 MB"), (12_340_000, "12.3 MB"), (999.4e6, "999 MB"), (999.6e6, "1 GB"),
        (1e9, "1 GB"), (999.4e9, "999 GB"), (999.6e9, "1 TB"), (1e12, "1 TB"), (1.25e12, "1.25 TB"), (1234e12, "1,234 TB"),
    ],
)  # fmt: skip
def test_a_size_has_three_digits_and_no_exponent(size: float, text: str) -> None:
    assert gigabytes(size) == text
