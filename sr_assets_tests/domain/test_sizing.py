"""Which batches are for Spark."""

import pytest

from sr_assets.domain.sizing import FROM_MESSAGES, needs_spark

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
