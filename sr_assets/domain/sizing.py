"""How much work needs Spark, what is fetched for it, and how long a run rests once it has caught up with a stream.

Here: the decisions, as functions of sizes. Not here: the work itself, in Spark (`adapters.spark`) or without.
"""

from typing import Final

#: Batches of fewer messages are read and copied in the run's own process. Measured at 20 messages a second: 4 % of a
#: core, and 117 % where each batch was two Spark jobs (docs/decisions/0017-small-batches-in-the-run.md).
FROM_MESSAGES: Final = 1_000
#: What a small batch may hold in the run's memory.
_SMALL_BYTES: Final = 8 * 1024 * 1024
#: Payloads that are smaller than this together come with their headers: that is one request, a consumer several.
_FETCHED_BYTES: Final = 1 << 20
#: How often a run looks at a stream that it has caught up with; half of it is what a message waits on average.
REST_SECONDS: Final = 1.5


#: What each site adds to that where one process serves several: a step costs 0.06 s of CPU, a host takes half a core.
_REST_SECONDS_A_SITE: Final = 0.12


def rest_seconds(sites: int) -> float:
    """Return how long a run rests between two looks, in a process that serves so many sites."""
    return max(REST_SECONDS, _REST_SECONDS_A_SITE * sites)


def needs_spark(messages: int, payload_bytes: int, from_messages: int) -> bool:
    """Return whether a batch is for Spark: it has `from_messages` messages or more, or more bytes than a run may hold."""
    return messages >= from_messages or payload_bytes > _SMALL_BYTES


def reads_headers_only(payload_bytes: int, *, needed: bool, direct: bool) -> bool:
    """Return whether a range is read without its payloads, about `payload_bytes` together, when they are not `needed`.

    It takes a consumer. Without one, by `direct` gets, little is read whole.
    """
    return not needed and (not direct or payload_bytes >= _FETCHED_BYTES)
