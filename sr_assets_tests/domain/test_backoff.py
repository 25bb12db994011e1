"""Backoff: growth, cap and the delay before the first failure."""

import pytest

from sr_assets.domain.backoff import backoff_seconds


@pytest.mark.parametrize(("failures", "seconds"), ((0, 0.0), (1, 0.5), (2, 1.0), (4, 4.0), (8, 30.0), (5_000, 30.0)))
def test_backoff_doubles_up_to_its_longest_delay(failures: int, seconds: float) -> None:
    assert backoff_seconds(failures, first_seconds=0.5, longest_seconds=30.0) == seconds
