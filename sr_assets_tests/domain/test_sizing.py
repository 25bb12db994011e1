"""Which batches are for Spark, and which are read without their payloads."""

import pytest

from sr_assets.domain.sizing import FROM_MESSAGES, needs_spark, reads_headers_only

MEBIBYTE = 1 << 20


@pytest.mark.parametrize(
    ("messages", "payload_bytes", "from_messages", "expected"),
    (
        (0, 0, FROM_MESSAGES, False),
        (FROM_MESSAGES - 1, 100, FROM_MESSAGES, False),
        (FROM_MESSAGES, 100, FROM_MESSAGES, True),
        (1, 8 * MEBIBYTE, FROM_MESSAGES, False),
        (1, 8 * MEBIBYTE + 1, FROM_MESSAGES, True),
        (1, 1, 0, True),
        (5_000, 1, 10_000, False),
    ),
)
def test_a_batch_is_for_spark_from_a_number_of_messages_or_of_bytes_on(
    messages: int, payload_bytes: int, from_messages: int, *, expected: bool
) -> None:
    assert needs_spark(messages, payload_bytes, from_messages) is expected


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
def test_payloads_stay_away_when_nobody_needs_them_and_a_consumer_is_worth_it(
    payload_bytes: int, *, needed: bool, direct: bool, expected: bool
) -> None:
    assert reads_headers_only(payload_bytes, needed=needed, direct=direct) is expected
