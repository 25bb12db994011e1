"""Latency of hops in logarithmic buckets, which keep any number of copies in bounded memory.

Bucket 0 is below a millisecond, the precision of the headers. Each further bucket is 4 % wider, so a value read from one is
at most 2 % wrong; a negative bucket is a negative latency, of clocks that differ.
"""

import math
from typing import Final

GROWTH: Final = 1.04
_MILLISECOND_NS: Final = 1_000_000


def bucket_of(took_ns: int) -> int:
    """Return the bucket of a latency."""
    milliseconds = abs(took_ns) / _MILLISECOND_NS
    if milliseconds < 1:
        return 0
    steps = int(math.log(milliseconds) / math.log(GROWTH)) + 1
    return steps if took_ns > 0 else -steps


def bucket_seconds(bucket: str) -> str:
    """Return the SQL for the latency of a bucket, in seconds."""
    return f"round(sign({bucket}) * pow({GROWTH}, abs({bucket}) - 0.5) / 1e3, 3)"
