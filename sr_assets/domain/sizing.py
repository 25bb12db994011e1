"""Decisions by size: Spark or not, payloads or not, and the intervals of polls and checkpoints."""

from typing import Final

#: A batch of so many messages, or so many bytes, is worth a job of a warm engine: a job adds about 0.25 s of CPU, and such a
#: batch takes a second. After so many of them, a run starts an engine, which takes 10 s of CPU
#: (docs/decisions/0017-small-batches-in-the-run.md).
JOB_MESSAGES: Final = 50_000
JOB_BYTES: Final = 128 << 20
ENGINE_JOBS: Final = 10
#: A replay holds at most so many messages in its own process.
MOST_HELD_MESSAGES: Final = 1_000_000
#: Below this total, payloads are read with their headers in one request; a consumer needs several.
_FETCHED_BYTES: Final = 1 << 20
#: Messages that one core reads in about ten seconds while catching up: the limit of a batch.
_CORE_MESSAGES: Final = 250_000
_CORE_BYTES: Final = 512 << 20
#: Maximum messages in a batch of a tracked stream, and default of `catch_up_messages`: with as many known senders the
#: fold gets 1,000,000 rows, which take some hundred MB in the run's process.
MAX_FOLD_MESSAGES: Final = 500_000
#: A batch of a plain stream that is behind should take about this long: its position and its counters move at the end.
_COPYING_SECONDS: Final = 5.0
#: A stream is far behind from this many batches on.
_FAR_BATCHES: Final = 4
#: Minimum messages of a task, which opens its own connection.
_TASK_MESSAGES: Final = 1_000
#: Polls of a site that has caught up use this share of a core, within the interval's limits.
_POLLING_SHARE: Final = 0.04
_SHORTEST_POLL_SECONDS: Final = 1.0
_LONGEST_POLL_SECONDS: Final = 2.0
#: Checkpoints take this share of a core of their thread. DuckDB's other thread does up to as much for them.
_CHECKPOINTS_SHARE: Final = 0.0075
#: Minimum poll interval per site if a process serves several: a host run takes half a core.
_POLL_SECONDS_A_SITE: Final = 0.12


def poll_seconds(cost_seconds: float, linger_seconds: float, sites: int) -> float:
    """Return the poll interval of a site in a process that serves this many sites; a message waits half of it on average.

    `cost_seconds` is the CPU time of one poll, from reading the sources to the publication. A run polls twice within
    `linger_seconds`, unless they are too short.
    """
    longest = min(_LONGEST_POLL_SECONDS, linger_seconds / 2)
    seconds = max(_SHORTEST_POLL_SECONDS, min(longest, cost_seconds / _POLLING_SHARE))
    return max(seconds, _POLL_SECONDS_A_SITE * sites)


def checkpoint_seconds(cost_seconds: float, interval_seconds: float) -> float:
    """Return the time from one checkpoint to the next: the interval, and more for a state of more than about 250,000 nodes.

    `cost_seconds` is the CPU time of its thread for the last one.
    """
    return max(interval_seconds, cost_seconds / _CHECKPOINTS_SHARE)


def jobs_worth(messages: int, payload_bytes: int) -> float:
    """Return how many jobs a batch is worth; one is given to Spark from 1 on."""
    return max(messages / JOB_MESSAGES, payload_bytes / JOB_BYTES)


def spark_rule(from_messages: int | None, *, cluster: bool) -> str:
    """Return in a line which batches and daily tables go to Spark, by the keys of the block `spark`."""
    if cluster:
        return "the cluster does all work, and computes daily tables if its executors have the files of the home"
    if from_messages is None:
        size = f"{JOB_MESSAGES:,} messages or {JOB_BYTES >> 20} MiB"
        first = "any batch of a run that Dagster started until it has caught up"
        return f"batches from {size} on, {first}; once the engine is warm; no daily table"
    if from_messages <= 1:
        return "every batch, and the daily tables; runs wait for the engine"
    return f"batches from {from_messages:,} messages on, once the engine is warm; daily tables from as many nodes on"


def reads_headers_only(payload_bytes: int, *, needed: bool, direct: bool) -> bool:
    """Return whether a range is read without its payloads (about `payload_bytes`) when they are not `needed`.

    This needs a consumer; by `direct` gets, small ranges are read whole.
    """
    return not needed and (not direct or payload_bytes >= _FETCHED_BYTES)


def is_far(behind: int, steady: int) -> bool:
    """Return whether a stream is far enough behind for larger batches; `steady` is the normal size."""
    return behind >= _FAR_BATCHES * steady


def catch_up_size(message_bytes: int, cores: int, steady: int, largest: int) -> int:
    """Return the batch size of a tracked stream that is far behind: the messages that the cores read in some seconds.

    `message_bytes` is the average size fetched. The result is between `steady` and `largest`.
    """
    most = min(largest, MAX_FOLD_MESSAGES)
    return max(steady, min(most, cores * _CORE_MESSAGES, cores * _CORE_BYTES // max(1, message_bytes)))


def copying_size(per_second: float, steady: int, largest: int) -> int:
    """Return the batch size of a plain stream that is behind: the messages that it copies in some seconds.

    `per_second` is the rate of its last batch in this run, 0 before the first one, which may be slow. The result is between
    `steady` and `largest`.
    """
    return max(steady, min(largest, int(per_second * _COPYING_SECONDS)))


def partitions(messages: int, cores: int) -> int:
    """Return the number of tasks for this many messages: one per core, or one for a few messages."""
    return max(1, min(cores, messages // _TASK_MESSAGES))
