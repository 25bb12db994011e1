"""The streaming query of a lake: from a stream to partitioned files in any sink format of the session.

The data source is a class of its own for each lake. Its connection is pickled into the class, where no plan, option,
checkpoint or event log shows it.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSource, DataSourceStreamReader
from pyspark.sql.types import StructType

from sr_assets.adapters.private import make_shared_folder
from sr_assets.adapters.spark.stream_format import STREAM_SCHEMA, StreamOptions, to_batch
from sr_assets.adapters.spark.stream_reader import StreamStreamReader
from sr_assets.adapters.spark.tasks import archive_name
from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import Message
from sr_assets.domain.senders import SenderExtractor, inspect

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from pyspark.sql import SparkSession

LAKE_SCHEMA: Final = f"{STREAM_SCHEMA}, sender string, date date"
#: The folder of the checkpoint in the lake's: Spark reads no file below a name with an underscore.
_CHECKPOINT: Final = "_checkpoint"
#: Spark's log of the files whose batches are complete, in the lake's folder.
_LOG: Final = "_spark_metadata"
#: The formats whose files Spark's own sink writes and logs; other sinks, such as delta, keep their own log.
_FILE_FORMATS: Final = ("avro", "csv", "json", "orc", "parquet", "text", "xml")
#: A file that Spark's sink writes: its number in the task, and a random id.
_WRITTEN: Final = re.compile(r"part-\d+-[0-9a-f-]{36}[.-].*")
_POLL_SECONDS: Final = 2


@dataclass(frozen=True, slots=True)
class Lake:
    """A lake to fill: its folder or URL, how its files are written, and the stream that it holds.

    `extractor` finds the sender of a message; None: no message has one.
    """

    path: str
    format: str
    partition_by: tuple[str, ...]
    options: Mapping[str, str]
    stream: StreamOptions
    extractor: SenderExtractor | None

    @property
    def folder(self) -> Path | None:
        """The folder on this machine, or None for a URL of Spark's file systems."""
        return Path(self.path) if self.path.startswith("/") else None


@dataclass(slots=True)
class Filling:
    """The progress of a query: the rows of each of its batches, and its first and next sequence."""

    rows: dict[int, int] = field(default_factory=dict)
    first: int = 0
    next: int = 0

    def note(self, progress: Mapping[str, Any]) -> None:
        """Take over Spark's report about a batch, or about a query without a new message."""
        (source,) = progress["sources"]
        end = json.loads(source["endOffset"])
        # The first batch of a checkpoint has no start.
        start = json.loads(source["startOffset"] or "null") or {"next": end["initial"]}
        self.first = self.first or start["next"]
        self.next = max(self.next, end["next"])
        self.rows[progress["batchId"]] = source["numInputRows"]


class LakeReader(StreamStreamReader):
    """The public format's reader, with the columns `sender` and `date`, the UTC date of `stored_at`."""

    _owner = "the lake"
    _remedy = "set another lake.path, or move the folder away to begin a new lake"

    def __init__(self, lake: Lake, schema: StructType) -> None:
        super().__init__(lake.stream, StructType(schema.fields[:-2]))
        self._extractor = lake.extractor

    def _batch(self, messages: Sequence[Message]) -> pa.RecordBatch:
        import pyarrow as pa

        rows, extractor = to_batch(self._columns, messages), self._extractor
        senders = [
            extractor and inspect(extractor, None, message.subject, message.headers, message.payload)[0]
            for message in messages
        ]
        columns = [*rows.columns, pa.array(senders, pa.string()), rows.column("stored_at").cast(pa.date32())]
        return pa.RecordBatch.from_arrays(columns, names=[*rows.schema.names, "sender", "date"])


def _source_of(lake: Lake) -> type[DataSource]:
    """Return the data source of a lake for one query.

    Its name is new each time: a Connect server keeps the plans of a session, with the sources that had their names then.
    """
    format_name = f"sr_assets_lake_{uuid.uuid4().hex}"
    packed, archive = pickle.dumps(lake), archive_name()

    # A class in a function is pickled as code with its variables, not by name, so loading it needs none of our modules.
    class LakeSource(DataSource):
        @classmethod
        def name(cls) -> str:
            return format_name

        def schema(self) -> str:
            return LAKE_SCHEMA

        def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802  Spark's name
            import pickle
            import sys
            from pathlib import Path

            path = next((path for path in sys.path if path.endswith(archive)), None)
            if path is not None and not Path(path).exists():
                # Spark names a folder of the query, and has the session's files above it.
                sys.path[:0] = [str(file) for file in Path(path).parent.parent.rglob(archive)][:1]
            from sr_assets.adapters.spark.lake_query import LakeReader

            return LakeReader(pickle.loads(packed), schema)  # noqa: S301  our own bytes

    return LakeSource


def fill_lake(session: SparkSession, lake: Lake, watch: Callable[[Filling], None]) -> Filling:
    """Append the stream's messages that the lake lacks, up to the last one at the start of the query.

    The checkpoint in the lake makes it exactly once. Spark stops a query that a killed run has left on the engine. `watch` is
    called every two seconds, and its error ends the query. Raises RunError if the folder is not this lake's, OSError if it
    cannot be written, and what PySpark raises.
    """
    _refuse_foreign_files(session, lake)
    source = _source_of(lake)
    with _without_orphans(lake):
        session.dataSource.register(source)
        query = (
            session.readStream.format(source.name())
            .load()
            .writeStream.format(lake.format)
            .options(**lake.options)
            .option("path", lake.path)
            .option("checkpointLocation", f"{lake.path}/{_CHECKPOINT}")
            .partitionBy(*lake.partition_by)
            .trigger(availableNow=True)
            .start()
        )
        filling, ended = Filling(), False
        try:
            while not ended:
                watch(filling)
                ended = bool(query.awaitTermination(_POLL_SECONDS))
                # Spark keeps the last hundred.
                for progress in query.recentProgress:
                    filling.note(progress)
        finally:
            # It would outlive this process.
            with contextlib.suppress(Exception):  # its engine may be lost
                query.stop()
    return filling


def _refuse_foreign_files(session: SparkSession, lake: Lake) -> None:
    """Raise RunError if the folder holds files, but no lake."""
    if lake.format in _FILE_FORMATS and _has_files(session, lake, "") and not _has_files(session, lake, _CHECKPOINT):
        raise RunError("the folder holds files that no lake has written; set another lake.path, or move them away")


def _has_files(session: SparkSession, lake: Lake, inner: str) -> bool:
    """Return whether there are files in the lake's folder, or in a folder inside it; hidden ones do not count."""
    if lake.folder is not None:
        shown = (path for path in (lake.folder / inner).glob("*") if not path.name.startswith(("_", ".")))
        return any(file.is_file() for path in shown for file in (path, *path.rglob("*")))
    try:
        # A Connect server would show the files of an earlier run's plan with the same options.
        new = {"recursiveFileLookup": "true", "listed_for": uuid.uuid4().hex}
        files = session.read.format("binaryFile").options(**new).load(f"{lake.path}/{inner}")
        return bool(files.select("path").head(1))
    except Exception as error:
        if "PATH_NOT_FOUND" in str(error):
            return False
        raise


@contextlib.contextmanager
def _without_orphans(lake: Lake) -> Iterator[None]:
    """Delete the files of interrupted batches after a query that succeeds, so that every reader finds each row once.

    Only Spark knows from its log which files count. A batch that an interrupted query has left is complete by then, so that its
    earlier files can never count. Spark alone reaches other file systems, and deletes nothing there.
    """
    if lake.folder is None or lake.format not in _FILE_FORMATS:
        yield
        return
    make_shared_folder(lake.folder)
    begun = lake.folder / _CHECKPOINT / "begun"
    begun.parent.mkdir(exist_ok=True)
    was_interrupted = begun.exists()
    if not was_interrupted:
        begun.touch()
    yield
    if was_interrupted:
        since_ns = begun.stat().st_mtime_ns
        listed = {name for log in (lake.folder / _LOG).glob("[0-9]*") for name in _listed_files(log)}
        for file in lake.folder.rglob("part-*"):
            if _WRITTEN.fullmatch(file.name) and file.name not in listed and file.stat().st_mtime_ns >= since_ns:
                file.unlink()
    begun.unlink()


def _listed_files(log: Path) -> Iterator[str]:
    """Yield the names of the files in a log of Spark's sink, which has a line for each after the line of its version."""
    for line in log.read_text().splitlines()[1:]:
        yield json.loads(line)["path"].rpartition("/")[2]
