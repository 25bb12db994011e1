"""A run of a lake: it appends a stream's new messages to its files by a query on the engine, for which it waits.

The site's runs do not wait for it: a lake has a lock and an engine session's operations of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sr_assets.adapters import times
from sr_assets.adapters.connection_file import pack_cluster
from sr_assets.adapters.locking import lock, read_holder, write_holder
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.private import open_private, own_folder
from sr_assets.domain.errors import ConfigurationError, EngineLostError, RunError, cannot_write
from sr_assets.stages.leadership import Leadership

if TYPE_CHECKING:
    from sr_assets.adapters.nats.stream_info import StreamInfo
    from sr_assets.adapters.spark.lake_query import Filling, Lake
    from sr_assets.adapters.spark.run_session import SparkConnection
    from sr_assets.settings import Settings, StreamSettings

logger = logging.getLogger(__name__)

#: The name of a lake's lock in its site's folder, with the stream's name.
LOCK: Final = "lake-{}.lock"
#: Spark's errors about the block `lake`, and their remedies.
_REMEDIES: Final = {
    "DATA_SOURCE_NOT_FOUND": "add the package of lake.format to spark.jars.packages of spark.config, or use parquet",
    "FileSystem": "add the package of this file system to spark.jars.packages of spark.config",
    "mkdir of|[Pp]ermission denied|AccessDenied|[Rr]ead-only": "permit writing there, or set another lake.path",
    "No space left|quota": "free some space",
    "UNSUPPORTED_DATA_TYPE": "use a format that has maps, such as parquet",
    "CODEC_NOT_AVAILABLE": "correct lake.options",
}
_LOGGED_SECONDS: Final = 10.0
_WRAPPING: Final = re.compile(
    r"\(java[\w.]+\) |\[STREAM_FAILED\] Query \[.*?\] terminated with exception: | SQLSTATE: \w+"
)


@dataclass(frozen=True, slots=True)
class LakeReport:
    """The result of a lake's run.

    - `rows`: the rows that it wrote
    - `position`: the next sequence to read
    - `lost`: the sequences that the stream had deleted at its start before the lake read them
    - `behind`: the sequences that the stream has after the position
    """

    path: str
    rows: int
    position: int
    lost: int
    behind: int


def fill(settings: Settings, stream: StreamSettings, spark: SparkConnection, run_id: str) -> LakeReport:
    """Append the messages that a stream's lake lacks, and return the result.

    Raises StandbyError if another member leads the site, and RunError in one line with the lake's path for any failure.
    """
    assert stream.lake is not None
    path = stream.lake.location(settings.home.resolve())
    with _locked(settings, stream, run_id), Leadership(settings, stream.name) as leadership:
        leadership.require()
        try:
            if spark.remote and path.startswith("/"):
                raise ConfigurationError(
                    "is a folder of this host, which the cluster does not share; use a URL such as s3a://bucket/folder, or"
                    " file:/folder for a mount that all its machines have"
                )
            before = _stream_info(stream)
            filling = _query(_lake(stream, path), spark, _watch(stream, leadership))
            after = _stream_info(stream)
        except ConfigurationError as error:
            raise ConfigurationError(f"{stream.label}: lake {path}: {error}") from error
        except OSError as error:
            raise RunError(f"{stream.label}: lake {cannot_write(error.filename or path, error)}") from error
        except EngineLostError as error:
            raise EngineLostError(
                f"{stream.label}: lake {path}: the Spark engine ended during the query; the next run continues from the lake's"
                " checkpoint"
            ) from error
        except RunError as error:
            raise type(error)(f"{stream.label}: lake {path}: {_with_remedy(str(error))}") from error
    lost = max(0, before.first_sequence - filling.first)
    if lost:
        logger.warning("%s: lake %s: the stream deleted %d messages before they were read", stream.label, path, lost)
    logger.info("%s: lake %s: %d rows, position %d", stream.label, path, sum(filling.rows.values()), filling.next)
    behind = max(0, after.last_sequence + 1 - filling.next)
    return LakeReport(path, sum(filling.rows.values()), filling.next, lost, behind)


@contextlib.contextmanager
def _locked(settings: Settings, stream: StreamSettings, run_id: str) -> Iterator[None]:
    """Hold the lock of a lake, because two queries must not share its checkpoint; raises RunError if another run has it."""
    folder = settings.home / "sites" / stream.name
    own_folder(folder)
    with open_private(folder / LOCK.format(stream.stream)) as file:
        if not lock(file):
            raise RunError(f"{stream.label}: lake is under way: {read_holder(file)}; wait for its end")
        write_holder(file, f"run {run_id} (pid {os.getpid()})\n")
        try:
            yield
        finally:
            os.ftruncate(file.fileno(), 0)


def is_filling(settings: Settings, stream: StreamSettings) -> bool:
    """Return whether a run of the stream's lake is under way."""
    try:
        with (settings.home / "sites" / stream.name / LOCK.format(stream.stream)).open() as file:
            return not lock(file, shared=True)
    except FileNotFoundError:
        return False


def _stream_info(stream: StreamSettings) -> StreamInfo:
    with Cluster(stream.source, f"sr-assets {stream.name}") as cluster:
        return cluster.stream_info(stream.stream)


def _lake(stream: StreamSettings, path: str) -> Lake:
    """Return the lake of a stream, from its first message on, with the connection that the tasks need."""
    from sr_assets.adapters.spark.lake_query import Lake
    from sr_assets.adapters.spark.stream_format import Bound, StreamOptions

    assert stream.lake is not None
    options = StreamOptions(
        pack_cluster(stream.source),
        stream.stream,
        # The first message that the stream holds, whatever its sequence.
        start=Bound(time_ns=0),
        filter_subject=stream.filter_subject,
        max_messages=stream.catch_up_messages,
    )
    block = stream.lake
    return Lake(path, block.format, block.partition_by, block.options, options, stream.extractor)


def _watch(stream: StreamSettings, leadership: Leadership) -> Callable[[Filling], None]:
    """Return what a running query calls: it logs the progress, and raises LeadershipLostError if another member may lead."""
    logged_at = times.monotonic()

    def watch(filling: Filling) -> None:
        nonlocal logged_at
        leadership.ensure()
        if times.monotonic() >= logged_at + _LOGGED_SECONDS:
            logged_at = times.monotonic()
            logger.info("%s: lake: %d rows, position %d", stream.label, sum(filling.rows.values()), filling.next)

    return watch


def _query(lake: Lake, spark: SparkConnection, watch: Callable[[Filling], None]) -> Filling:
    """Run the query of a lake in a run's session; an OSError stays one, which the session would report as Spark's."""
    from sr_assets.adapters.spark.lake_query import fill_lake

    with spark.use() as session:
        try:
            return fill_lake(session, lake, watch)
        except OSError as error:
            failure = error
    raise failure


def _with_remedy(line: str) -> str:
    """Return a line about a failed query with its remedy, without Spark's frame around it."""
    short = _WRAPPING.sub("", line)
    remedy = next((remedy for sign, remedy in _REMEDIES.items() if re.search(sign, short)), None)
    return f"{short.rstrip('.')}; {remedy}" if remedy else short
