"""The delay before a retry, for everything that retries with exponential backoff."""

from typing import Final

#: More doublings than this would only overflow: every longest delay is reached long before.
_MOST_DOUBLINGS: Final = 30


def backoff_seconds(failures: int, *, first_seconds: float, longest_seconds: float) -> float:
    """Return the delay after this many consecutive failures: it doubles with each, has no jitter, and is 0 without a failure."""
    if failures <= 0:
        return 0.0
    return min(first_seconds * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), longest_seconds)
