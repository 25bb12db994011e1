"""Which batches are for Spark, and which are read without their payloads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.domain.sizing import (
    MAX_FOLD_MESSAGES,
    catch_up_size,
    checkpoint_seconds,
    copying_size,
    is_far,
    partitions,
    reads_headers_only,
)

MEBIBYTE = 1 << 20


@pytest.mark.parametrize(
    ("payload_bytes", "needed", "direct", "expected"),
    (
        (MEBIBYTE, False, True, True),
        (MEBIBYTE - 1, False, True, False),
        (1, False, False, True),
        (100 * MEBIBYTE, True, True, False),
        (100 * MEBIBYTE, True, False, False),
    ),
)
def test_payloads_are_left_out_if_unneeded_and_a_consumer_pays_off(
    payload_bytes: int, *, needed: bool, direct: bool, expected: bool
) -> None:
    assert reads_headers_only(payload_bytes, needed=needed, direct=direct) is expected


@pytest.mark.parametrize(
    ("message_bytes", "cores", "steady", "largest", "expected"),
    (
        (1_000, 2, 50_000, MAX_FOLD_MESSAGES, 500_000),
        (1_000, 1, 50_000, MAX_FOLD_MESSAGES, 250_000),
        (1_000, 8, 50_000, MAX_FOLD_MESSAGES, 500_000),
        (7_000, 64, 50_000, MAX_FOLD_MESSAGES, 500_000),
        (7_000, 2, 50_000, MAX_FOLD_MESSAGES, 153_391),
        (64_000, 2, 10_485, MAX_FOLD_MESSAGES, 16_777),
        # Payloads that nobody reads.
        (1, 2, 50_000, MAX_FOLD_MESSAGES, 500_000),
        (1_000, 2, 50_000, 120_000, 120_000),
        (1_000, 2, 50_000, 50_000, 50_000),
        (1 << 20, 2, 640, MAX_FOLD_MESSAGES, 1_024),
    ),
)
def test_a_batch_far_behind_is_what_the_cores_read_in_some_seconds(
    message_bytes: int, cores: int, steady: int, largest: int, expected: int
) -> None:
    assert catch_up_size(message_bytes, cores, steady, largest) == expected


COUNTS = st.integers(1, 10**9)


@given(message_bytes=COUNTS, cores=st.integers(1, 1_000), steady=COUNTS, largest=COUNTS)
def test_a_batch_far_behind_keeps_its_bounds(message_bytes: int, cores: int, steady: int, largest: int) -> None:
    size = catch_up_size(message_bytes, cores, steady, largest)
    assert steady <= size <= max(steady, largest)
    assert size <= max(steady, min(500_000, 250_000 * cores))
    assert size == steady or size * message_bytes <= (512 << 20) * cores
    assert size <= catch_up_size(message_bytes, cores + 1, steady, largest)
    assert size >= catch_up_size(message_bytes + 1, cores, steady, largest)


def test_a_stream_is_far_behind_from_four_batches_on() -> None:
    assert [is_far(behind, 50_000) for behind in (0, 50_000, 199_999, 200_000)] == [False, False, False, True]


@pytest.mark.parametrize(("messages", "cores", "expected"), ((1, 8, 1), (2_500, 8, 2), (50_000, 8, 8), (50_000, 1, 1)))
def test_each_core_reads_a_part_unless_there_is_little(messages: int, cores: int, expected: int) -> None:
    assert partitions(messages, cores) == expected


@pytest.mark.parametrize(
    ("per_second", "steady", "largest", "expected"),
    (
        (0.0, 50_000, 500_000, 50_000),
        (60_000.0, 50_000, 500_000, 300_000),
        (2_000.0, 50_000, 500_000, 50_000),
        (1e9, 50_000, 500_000, 500_000),
        (0.0, 1, 1, 1),
    ),
)
def test_plain_stream_that_is_behind_copies_some_seconds_at_once(
    per_second: float, steady: int, largest: int, expected: int
) -> None:
    assert copying_size(per_second, steady, largest) == expected


@pytest.mark.parametrize(
    ("cost", "interval", "seconds"), ((0.2, 60, 60), (0.45, 60, 60), (1.8, 60, 240), (1.8, 600, 600))
)
def test_checkpoint_waits_longer_the_more_it_costs(cost: float, interval: float, seconds: float) -> None:
    assert checkpoint_seconds(cost, interval) == pytest.approx(seconds)
