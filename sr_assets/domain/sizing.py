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
#: The default of `catch_up_messages`; `_MOST_MESSAGES` is a lower limit, which cannot be configured.
CATCH_UP_MESSAGES: Final = 2_000_000
#: What one core reads of a stream that is far behind in about ten seconds: a batch is no longer than that.
_CORE_MESSAGES: Final = 250_000
_CORE_BYTES: Final = 512 << 20
#: No batch is larger, however many cores read it: with as many known senders it gives the fold 1,000,000 rows, the
#: most that it takes in the run's own process (`tracking.fold`). In Spark 1.1 million end an engine of our small heap.
_MOST_MESSAGES: Final = 500_000
#: From so many batches on a stream is far behind.
_FAR_BATCHES: Final = 4
#: What a task reads at least: it opens a connection of its own.
_TASK_MESSAGES: Final = 1_000
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


def is_far(behind: int, steady: int) -> bool:
    """Return whether a stream is so many messages behind that its batches grow; `steady` is their size else."""
    return behind >= _FAR_BATCHES * steady


def catch_up_size(message_bytes: int, cores: int, steady: int, largest: int) -> int:
    """Return how many messages a batch has of a tracked stream that is far behind: what the cores read in some seconds.

    `message_bytes` are fetched of each, on average. At least `steady`, else at most `largest`.
    """
    most = min(largest, _MOST_MESSAGES)
    return max(steady, min(most, cores * _CORE_MESSAGES, cores * _CORE_BYTES // max(1, message_bytes)))


def partitions(messages: int, cores: int) -> int:
    """Return how many tasks read so many messages: one for each core, and one for a few."""
    return max(1, min(cores, messages // _TASK_MESSAGES))
