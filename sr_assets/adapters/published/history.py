"""The Parquet history of copied messages: its rows and its files.

Here: the columns of a snapshot, moving staged files into the history, compaction and retention of days. Not here: deciding
what is staged (`copying`), the table of the newest message per node (`state`), the view over the files (`schema`).

A file's path is `snapshots/name=…/stream=…/date=YYYY-MM-DD/<first>-<next>.parquet`: the UTC date of `stored_at`, and the
batch's range of source sequences, so a repeated batch overwrites its own file.
"""

from __future__ import annotations

import shutil
from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Self
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from sr_assets.domain.registration import decode_payload
from sr_assets.domain.subjects import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from sr_assets.domain.messages import Message
    from sr_assets.domain.positions import SequenceRange

_CHUNK: Final = 500
_MOST_CHUNKS: Final = 4
#: One row per copied message of a tracked sender; name, stream and date are in the path.
SCHEMA: Final = pa.schema(
    [
        ("node", pa.string()),
        ("sequence", pa.int64()),
        ("stored_at", pa.timestamp("us", tz="UTC")),
        ("subject", pa.string()),
        ("payload_bytes", pa.int64()),
        ("payload", pa.string()),
        ("payload_raw", pa.binary()),
        ("metadata", pa.string()),
    ]
)


def snapshot_rows(messages: Sequence[Message], nodes: Mapping[int, str | None]) -> pa.Table:
    """Return one row per message; `nodes` are the senders by sequence.

    `payload` is text when it is JSON that every reader accepts, else `payload_raw` has the bytes: one row that DuckDB
    cannot cast to JSON would make every query fail.
    """
    decoded = [decode_payload(message.payload) for message in messages]
    columns = [
        [nodes[message.sequence] for message in messages],
        [message.sequence for message in messages],
        [message.stored_ns // 1000 for message in messages],
        [printable(message.subject) for message in messages],
        [len(message.payload) for message in messages],
        [text for text, _ in decoded],
        [message.payload if text is None else None for message, (text, _) in zip(messages, decoded, strict=True)],
        [metadata for _, metadata in decoded],
    ]
    arrays = [pa.array(values, field.type) for values, field in zip(columns, SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def open_writer(file: Path) -> parquet.ParquetWriter:
    """Return a writer of `SCHEMA`: dictionaries only where values repeat, which halves the time to write payloads."""
    return parquet.ParquetWriter(
        file, SCHEMA, compression="zstd", use_dictionary=["node"], write_statistics=["node", "sequence"]
    )


class StagedFiles:
    """One writer's rows of a batch, one file per UTC date of the stored time; entered with `with`.

    `<folder>/date=YYYY-MM-DD/<partition>.parquet` is complete or absent. One thread unpacks payloads during the copying,
    which mostly waits for servers; half of that, and the writing, runs outside of the GIL. A second thread gains nothing.
    """

    def __init__(self, folder: Path, partition: int) -> None:
        """Name the batch's folder and the writer's number."""
        self._folder = folder
        self._name = f"{partition}.parquet"
        self._writers: dict[str, parquet.ParquetWriter] = {}
        self._unpacking: deque[tuple[str, Future[pa.Table]]] = deque()
        self._pool = ThreadPoolExecutor(1, "staging")

    def __enter__(self) -> Self:
        """Return it without any file: a file is opened for its first row."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the files, and move them to their final names unless something failed."""
        with self._pool:
            while self._unpacking and kind is None:
                self._write_next()
            self._pool.shutdown(cancel_futures=True)
        for date, writer in self._writers.items():
            writer.close()
            folder = self._folder / f"date={date}"
            if kind is None:
                (folder / f".{self._name}").replace(folder / self._name)

    def add(self, messages: Iterable[Message], nodes: Mapping[int, str | None]) -> None:
        """Add one row per message; `nodes` are the senders by sequence."""
        by_date: dict[str, list[Message]] = defaultdict(list)
        for message in messages:
            by_date[datetime.fromtimestamp(message.stored_ns // 1_000_000_000, UTC).date().isoformat()].append(message)
        for date, of_date in by_date.items():
            for first in range(0, len(of_date), _CHUNK):
                chunk = of_date[first : first + _CHUNK]
                self._unpacking.append((date, self._pool.submit(snapshot_rows, chunk, nodes)))
        while len(self._unpacking) > _MOST_CHUNKS:
            self._write_next()

    def _write_next(self) -> None:
        date, rows = self._unpacking.popleft()
        if date not in self._writers:
            folder = self._folder / f"date={date}"
            folder.mkdir(parents=True, exist_ok=True)
            self._writers[date] = open_writer(folder / f".{self._name}")
        self._writers[date].write_table(rows.result())


def stream_folder(home: Path, name: str, stream: str) -> Path:
    """Return the folder of one stream's history."""
    return home / "snapshots" / f"name={quote(name, safe='')}" / f"stream={quote(stream, safe='')}"


def copied_sequences(folder: Path, since_ns: int) -> list[int]:
    """Return the source sequences in a stream's history, ascending, of messages stored since a time (unix ns)."""
    since = pa.scalar(since_ns // 1000, pa.timestamp("us", tz="UTC"))
    sequences: set[int] = set()
    for file in folder.glob("date=*/[0-9]*.parquet"):
        rows = parquet.read_table(file, columns=["sequence", "stored_at"], partitioning=None)
        sequences.update(rows.filter(pc.greater_equal(rows["stored_at"], since))["sequence"].to_pylist())
    return sorted(sequences)


def place_staged(staging: Path, folder: Path, covered: SequenceRange) -> list[Path]:
    """Move a batch's staged files to their dates; returns all of its files, also those an earlier attempt moved."""
    for dated in sorted(staging.glob("date=*")):
        parts = sorted(dated.glob("[0-9]*.parquet"))
        if not parts:
            continue
        file = folder / dated.name / f"{covered.first}-{covered.next}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        if len(parts) == 1:
            parts[0].replace(file)
        else:
            _merge(parts, file)
    shutil.rmtree(staging, ignore_errors=True)
    return sorted(folder.glob(f"date=*/{covered.first}-{covered.next}.parquet"))


def _merge(parts: Iterable[Path], file: Path) -> None:
    """Write the rows of several files into one, part by part, so memory holds one row group at a time."""
    draft = file.with_name(f".{file.name}")
    with open_writer(draft) as writer:
        for part in parts:
            source = parquet.ParquetFile(part)
            for group in range(source.num_row_groups):
                writer.write_table(source.read_row_group(group))
    draft.replace(file)


def compact_day(day: Path) -> Path | None:
    """Merge a day's files into one, `<first>-<next>.parquet` over all ranges; None when there is nothing to merge.

    The old files stay, because a published view may still read them. `remove_covered` deletes them later.
    """
    ranges = _outermost(day)
    if len(ranges) < 2:
        return None
    whole = day / f"{min(first for first, _ in ranges.values())}-{max(last for _, last in ranges.values())}.parquet"
    _merge(sorted(ranges, key=lambda file: ranges[file]), whole)
    return whole


def remove_covered(day: Path) -> int:
    """Delete a day's files whose rows are in a compacted file too; returns how many."""
    kept = _outermost(day)
    covered = [file for file in day.glob("[0-9]*.parquet") if file not in kept]
    for file in covered:
        file.unlink()
    return len(covered)


def _outermost(day: Path) -> dict[Path, tuple[int, int]]:
    """Return a day's files with their ranges, without those that lie inside another's."""
    outer: dict[Path, tuple[int, int]] = {}
    end = -1
    files = {file: file_range(file) for file in day.glob("[0-9]*.parquet")}
    for file, (first, after) in sorted(files.items(), key=lambda item: (item[1][0], -item[1][1])):
        if after > end:
            outer[file] = (first, after)
            end = after
    return outer


def file_range(file: Path) -> tuple[int, int]:
    """Return the range of source sequences in a file's name."""
    first, _, after = file.stem.partition("-")
    return int(first), int(after)


def remove_before(folder: Path, date: str) -> int:
    """Delete the days before an ISO date; returns how many."""
    old = [day for day in folder.glob("date=*") if day.name.removeprefix("date=") < date]
    for day in old:
        shutil.rmtree(day)
    return len(old)
