"""The jobs of the pipeline: reading ranges of a stream, copying a batch, and testing the links of executors.

Tasks of this host's engine use the run's files. Those of a cluster bring their connections with them, leave no data on their
machine, and need only Python with pyspark, pyarrow, numpy and orjson there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

import pyarrow as pa

from sr_assets.adapters import times
from sr_assets.adapters.arrow_rows import arrow_schema, rows_of
from sr_assets.adapters.connection_file import PackedConnection, open_connection, pack_connection, unpacked
from sr_assets.adapters.copying.copier import write_copies
from sr_assets.adapters.copying.copy_plan import CopyPlan
from sr_assets.adapters.copying.fence import WritePermit
from sr_assets.adapters.copying.receipt import Receipt
from sr_assets.adapters.range_rows import RangeRead
from sr_assets.adapters.spark.tasks import run_tasks
from sr_assets.adapters.wire import WireError
from sr_assets.domain.errors import RunError, SrAssetsError
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.subjects import printable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RECEIPT: Final = "receipt"
_PIECE_BYTES: Final = 1 << 20
#: All files of a batch, which has at most about 640 MiB of payloads; what exceeds it comes from no writer.
_MOST_BYTES: Final = 4 << 30
_MODULES: Final = ("pyarrow", "numpy", "orjson")
#: Minimum duration of a probing task, so that the next one goes to another executor.
_STAY_SECONDS: Final = 1.0
#: Tasks per core that test every link, so that each executor gets one.
_TRIES_A_CORE: Final = 2


@dataclass(frozen=True, slots=True)
class ReadWork:
    """Reads the ranges whose numbers are a task's rows; on a cluster with a `connection` of its own."""

    read: RangeRead
    ranges: tuple[SequenceRange, ...]
    connection: PackedConnection | None = None

    @property
    def schema(self) -> str:
        return self.read.kind.schema

    def run(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the messages' rows."""
        with _elsewhere(self.connection) as file:
            read = replace(self.read, connection=file) if file else self.read
            for numbers in rows:
                for number in numbers.column(0).to_pylist():
                    yield from read.batches(self.ranges[number])


def read_in_tasks(
    session: SparkSession, read: RangeRead, wanted: SequenceRange, tasks: int, *, remote: bool
) -> pa.Table:
    """Return the rows of a range, which this many tasks read, unordered; `remote`: on other machines."""
    ranges = tuple(wanted.split(tasks))
    work = ReadWork(read, ranges, pack_connection(read.connection) if remote else None)
    rows = run_tasks(session, range(len(ranges)), work, len(ranges))
    return rows.cast(arrow_schema(work.schema))


@dataclass(frozen=True, slots=True)
class CopyWork:
    """Copies the messages in a task's rows, as one writer; yields its receipt, and on a cluster its staged files in pieces.

    Rows: a source sequence (long), and for a tracked stream `node` (string).
    """

    schema: ClassVar[str] = "part long, name string, content binary"
    plan: CopyPlan
    #: The connections to source and target of a writer on another machine.
    connections: tuple[PackedConnection, PackedConnection] | None = None

    def run(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Copy, and yield the results."""
        from pyspark import TaskContext

        nodes, context = nodes_by_sequence(rows), TaskContext.get()
        part = context.partitionId() if context else 0
        if not nodes:
            return
        if self.connections is None:
            yield self._row(part, RECEIPT, write_copies(self.plan, nodes, part).encode().encode())
            return
        with (
            tempfile.TemporaryDirectory(prefix="sr-assets-") as folder,
            _elsewhere(self.connections[0]) as source,
            unpacked(self.connections[1]) as target,
        ):
            staging = Path(folder, "staged")
            plan = replace(
                self.plan,
                connection=target,
                source_connection=str(source),
                folder=folder,
                staging=str(staging) if self.plan.staging else None,
            )
            Path(folder, "batch").write_text(plan.batch)
            with WritePermit(plan, part):
                receipt = write_copies(plan, nodes, part)
            yield self._row(part, RECEIPT, receipt.encode().encode())
            for file in sorted(staging.rglob("*.parquet")):
                with file.open("rb") as content:
                    for piece in iter(lambda: content.read(_PIECE_BYTES), b""):
                        yield self._row(part, str(file.relative_to(staging)), piece)

    def _row(self, part: int, name: str, content: bytes) -> pa.RecordBatch:
        return rows_of(self.schema, ([part], [name], [content]))


def copy_in_tasks(
    session: SparkSession, rows: pa.Table | range, plan: CopyPlan, writers: int, *, by: str | None, remote: bool
) -> Receipt:
    """Copy the messages in `rows` by this many writers, and return the sum of their receipts.

    Rows with equal values in the column `by` go to one writer. The plan's folder gets the staged files of writers on other
    machines (`remote`).
    """
    work = CopyWork(plan)
    if remote:
        # The lease is a file of this machine; on a cluster, the fence decides.
        packed = pack_connection(plan.source_connection), pack_connection(plan.connection)
        work = CopyWork(replace(plan, leases=()), packed)
    results = run_tasks(session, rows, work, writers, by=by)
    return take_results(results, Path(plan.staging) if remote and plan.staging else None)


def nodes_by_sequence(rows: Iterator[pa.RecordBatch]) -> dict[int, str | None]:
    """Return a task's rows as one writer needs them: source sequence → node."""
    nodes: dict[int, str | None] = {}
    for batch in rows:
        named = batch.column("node").to_pylist() if "node" in batch.schema.names else itertools.repeat(None)
        nodes.update(zip(batch.column(0).to_pylist(), named, strict=False))
    return nodes


@contextlib.contextmanager
def _elsewhere(packed: PackedConnection | None) -> Iterator[str | None]:
    """Yield the path of an executor's connection file, and name the executor in a connection error.

    The executor's name matters, because this machine may reach the same server.
    """
    if packed is None:
        yield None
        return
    try:
        with unpacked(packed) as file:
            yield file
    except WireError as error:
        raise type(error)(f"executor on {socket.gethostname()}: {error}") from None


def take_results(rows: pa.Table, staging: Path | None) -> Receipt:
    """Add up the receipts of `CopyWork`, and write its files to a folder, each completely or not at all.

    Raises RunError for a file that no writer names so, or for a second one of a part and a date: an executor is not
    trusted with this machine's disk.
    """
    if rows["content"].nbytes > _MOST_BYTES:
        raise RunError(
            f"the tasks of the cluster returned {rows['content'].nbytes} bytes of files; check the executors"
        )
    total = Receipt()
    drafts: dict[Path, Path] = {}
    columns = (rows[name].to_pylist() for name in ("part", "name", "content"))
    written: set[object] = set()
    for (part, name), pieces in itertools.groupby(zip(*columns, strict=True), key=lambda row: row[:2]):
        if (part, name) in written or not (name == RECEIPT or name in _staged_names(part, name or "")):
            raise RunError(
                f"a task of the cluster returned the file {printable(name or '')[:100]!r}; check the executors"
            )
        written.add((part, name))
        if name == RECEIPT:
            for _, _, content in pieces:
                total.add(Receipt.decode(content))
        elif staging is not None:
            file = staging / name
            file.parent.mkdir(parents=True, exist_ok=True)
            drafts[file] = file.with_name(f".{file.name}")
            with drafts[file].open("wb") as output:
                output.writelines(content for _, _, content in pieces)
    for file, draft in drafts.items():
        draft.replace(file)
    return total


def _staged_names(part: int, name: str) -> set[str]:
    """Return the only name that a part's file may have, if `name` names a date."""
    try:
        return {f"date={date.fromisoformat(name[5:15])}/{part}.parquet"}
    except ValueError:
        return set()


@dataclass(frozen=True, slots=True)
class TryWork:
    """Tests whether an executor has the modules of a task and reaches each server; `error` is null for success.

    With a `folder` of this host's home, it tests whether the executor works with its files too.
    """

    schema: ClassVar[str] = "executor string, link string, error string"
    links: Mapping[str, PackedConnection]
    folder: str | None = None

    def run(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield a row for each link, and one without a link name for the modules."""
        began = times.monotonic()
        for _ in rows:
            tried = [("", _missing_modules()), *((label, _try_link(link)) for label, link in self.links.items())]
            if self.folder:
                tried.append(("home", _try_folder(Path(self.folder))))
            executor = f"{socket.gethostname()} ({Path.cwd().name}, pid {os.getppid()})"
            yield rows_of(self.schema, ([executor] * len(tried), *zip(*tried, strict=True)))
        if self.links or self.folder:
            times.sleep(max(0.0, began + _STAY_SECONDS - times.monotonic()))


def try_links(
    session: SparkSession, links: Mapping[str, PackedConnection], cores: int = 1, folder: str | None = None
) -> Iterator[tuple[str, str, str | None]]:
    """Test links, and a folder, from each executor of a session with so many cores.

    Yields executor, link (`home` for the folder) and error (None for success).
    """
    count = cores * _TRIES_A_CORE if links or folder else 1
    seen: set[Sequence[str]] = set()
    for row in run_tasks(session, range(count), TryWork(dict(links), folder), count).to_pylist():
        line = (row["executor"], row["link"], row["error"])
        if line[:2] not in seen:
            seen.add(line[:2])
            yield line


def _missing_modules() -> str | None:
    """Return one line about a module that a worker's Python lacks."""
    import importlib

    for module in _MODULES:
        try:
            importlib.import_module(module)
        except ImportError as error:
            return (
                f"its Python {platform.python_version()} ({sys.executable}) lacks {module} ({error}); install it there"
            )
    return None


def _try_link(link: PackedConnection) -> str | None:
    try:
        with unpacked(link) as file, open_connection(file, "sr-assets check"):
            return None
    except SrAssetsError as error:
        return str(error)


def _try_folder(folder: Path) -> str | None:
    """Return one line about why the files of this host's home cannot be used here, or a missing module that they need."""
    try:
        import duckdb  # noqa: F401

        if folder.stat().st_uid != os.geteuid():
            return f"its user {os.geteuid()} is not the owner of {folder.parent}"
        with tempfile.NamedTemporaryFile(dir=folder):
            return None
    except (ImportError, OSError) as error:
        return str(error)
