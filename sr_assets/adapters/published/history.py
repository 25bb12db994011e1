"""The Parquet history of copied messages: its rows, staging a batch's files, and the retention of days.

A file's path is `snapshots/name=…/stream=…/date=YYYY-MM-DD/<first>-<next>.parquet`: the UTC date of `stored_at`, and
the batch's range of source sequences, so a repeated batch overwrites its own file. After a recreation or rollback of
the source its sequences mean other messages: file names then end in `-<created ns>-<restart>`. Only files of one source
are compared or compacted with each other.
"""

import itertools
import re
import shutil
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from sr_assets.adapters.private import make_shared_folder, remove_files, share_as_folder
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.registration import METADATA_BYTES, decode_payload
from sr_assets.domain.subjects import printable

#: The names of a history's files and, with a dot in front, of unfinished ones, as patterns for `remove_files`.
FILES: Final = ("[0-9]*-[0-9]*.parquet", ".[0-9]*-[0-9]*.parquet")
_FILE: Final = re.compile(r"[0-9]+(-[0-9]+)+\.parquet")
_CHUNK: Final = 500
_MOST_CHUNKS: Final = 8
#: Rows of a row group, unless their payloads are large.
GROUP_ROWS: Final = 50_000
_GROUP_BYTES: Final = 8 << 20
#: Payloads that wait to be unpacked.
_WAITING_BYTES: Final = 32 << 20
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


def snapshot_rows(
    messages: Iterable[Message], nodes: Mapping[int, str | None], most_bytes: int = METADATA_BYTES
) -> Iterator[tuple[pa.Table, int]]:
    """Yield one row per message, in tables of about `_GROUP_BYTES`, each with the number of its refused metadata.

    A small payload may unpack to `most_bytes` of metadata. `nodes` maps sequences to senders. `payload` is text if it is
    JSON that every reader accepts, else `payload_raw` has the bytes: a single row that DuckDB cannot cast to JSON would fail
    every query.
    """
    rows: list[tuple[object, ...]] = []
    held_bytes = refused = 0
    for message in messages:
        payload = message.payload
        text, metadata, is_refused = decode_payload(payload, most_bytes)
        raw = payload if text is None else None
        subject, stored_us = printable(message.subject), message.stored_ns // 1000
        rows.append((nodes[message.sequence], message.sequence, stored_us, subject, len(payload), text, raw, metadata))
        held_bytes += len(payload) + len(metadata or "")
        refused += is_refused
        if held_bytes >= _GROUP_BYTES:
            yield _table(rows), refused
            rows, held_bytes, refused = [], 0, 0
    if rows:
        yield _table(rows), refused


def _table(rows: Sequence[tuple[object, ...]]) -> pa.Table:
    columns = zip(*rows, strict=True)
    return pa.Table.from_arrays(
        [pa.array(values, field.type) for values, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )


def open_writer(file: Path, about: Mapping[str, str] | None = None) -> parquet.ParquetWriter:
    """Return a writer of `SCHEMA`, with `about` as the file's metadata.

    Only columns with repeated values have dictionaries, which halves the time to write payloads.
    """
    schema = SCHEMA.with_metadata(dict(about)) if about else SCHEMA
    return parquet.ParquetWriter(
        file, schema, compression="zstd", use_dictionary=["node"], write_statistics=["node", "sequence", "stored_at"]
    )


class StagedFiles:
    """One writer's rows of a batch as a context manager: one file per UTC date of the stored time.

    `<folder>/date=YYYY-MM-DD/<partition>.parquet` is complete or absent. One thread unpacks and writes payloads beside the
    copying; most of its work releases the GIL.
    """

    def __init__(self, folder: Path, partition: int, most_bytes: int = METADATA_BYTES) -> None:
        self._folder, self._most_bytes = folder, most_bytes
        self._name = f"{partition}.parquet"
        self._writers: dict[str, parquet.ParquetWriter] = {}
        # The open row group of each date.
        self._rows: dict[str, list[pa.Table]] = defaultdict(list)
        # The chunks that are not unpacked yet, each with the bytes of its payloads.
        self._staging: deque[tuple[Future[None], int]] = deque()
        self._pool = ThreadPoolExecutor(1, "staging")
        #: How many registrations have content that is not in their row; complete after the block.
        self.refused = 0

    def __enter__(self) -> Self:
        """Return self; the first row of a date opens its file."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the files, and move them to their final names unless the block failed."""
        try:
            while self._staging and kind is None:
                self._staging.popleft()[0].result()
            for date in [*self._rows] if kind is None else ():
                self._write(date)
        finally:
            self._pool.shutdown(cancel_futures=True)
            for writer in self._writers.values():
                writer.close()
        for date in self._writers if kind is None else ():
            folder = self._folder / f"date={date}"
            (folder / f".{self._name}").replace(folder / self._name)

    def add(self, messages: Iterable[Message], nodes: Mapping[int, str | None]) -> None:
        """Add one row per message; `nodes` maps sequences to senders. Raises OSError for an earlier row."""
        by_date: dict[str, list[Message]] = defaultdict(list)
        for message in messages:
            by_date[datetime.fromtimestamp(message.stored_ns // 1_000_000_000, UTC).date().isoformat()].append(message)
        for date, of_date in by_date.items():
            for first in range(0, len(of_date), _CHUNK):
                chunk = of_date[first : first + _CHUNK]
                size_bytes = sum(len(message.payload) for message in chunk)
                self._staging.append((self._pool.submit(self._stage, date, chunk, nodes), size_bytes))
        while len(self._staging) > _MOST_CHUNKS or sum(size for _, size in self._staging) > _WAITING_BYTES:
            self._staging.popleft()[0].result()

    def _stage(self, date: str, messages: Sequence[Message], nodes: Mapping[int, str | None]) -> None:
        """Unpack the rows of a date, and write the largest row group once one is full, or all together are as large."""
        for table, refused in snapshot_rows(messages, nodes, self._most_bytes):
            self.refused += refused
            self._rows[date].append(table)
            sizes = {day: sum(rows.nbytes for rows in tables) for day, tables in self._rows.items()}
            if len(self._rows[date]) * _CHUNK >= GROUP_ROWS:
                self._write(date)
            elif sum(sizes.values()) >= _GROUP_BYTES:
                self._write(max(sizes, key=sizes.__getitem__))

    def _write(self, date: str) -> None:
        """Write the rows of a date as one row group."""
        if date not in self._writers:
            folder = self._folder / f"date={date}"
            folder.mkdir(parents=True, exist_ok=True)
            self._writers[date] = open_writer(folder / f".{self._name}")
        self._writers[date].write_table(pa.concat_tables(self._rows.pop(date)), row_group_size=GROUP_ROWS)


def stream_folder(home: Path, name: str, stream: str) -> Path:
    return site_history(home, name) / f"stream={quote(stream, safe='')}"


def site_history(home: Path, name: str) -> Path:
    """Return the folder of the history of a site's streams."""
    return home / "snapshots" / f"name={quote(name, safe='')}"


def source_mark(created_ns: int, restart: int) -> str:
    """Return the suffix of a source's file names; empty for a stream's first source (restart 0)."""
    return f"-{created_ns}-{restart}" if restart else ""


def mark_restart(mark: str) -> int:
    """Return the restart number in a `source_mark`."""
    return int(mark.rpartition("-")[2]) if mark else 0


def copied_sequences(folder: Path, mark: str, since_ns: int, staged: Iterable[Path] = ()) -> list[int]:
    """Return the source sequences of one source in a stream's history, ascending, stored since a time (unix ns).

    `staged` are the folders of its committed batches that are not in the history yet.
    """
    since = pa.scalar(since_ns // 1000, pa.timestamp("us", tz="UTC"))
    sequences: set[int] = set()
    placed = [file for file in history_files(folder) if file_mark(file) == mark]
    for file in (*placed, *(part for each in staged for part in each.glob("date=*/[0-9]*.parquet"))):
        rows = parquet.read_table(file, columns=["sequence", "stored_at"], partitioning=None)
        sequences.update(rows.filter(pc.greater_equal(rows["stored_at"], since))["sequence"].to_pylist())
    return sorted(sequences)


def drop_rows(files: Iterable[Path], others: Iterable[Path]) -> list[Path]:
    """Remove the rows whose sequences are also in other files; return the files that still have rows."""
    doubled = pa.concat_arrays([_sequences(file) for file in others])
    left = []
    for file in files:
        rows = parquet.read_table(file, partitioning=None)
        single = rows.filter(pc.invert(pc.is_in(rows["sequence"], doubled)))
        if not len(single):
            file.unlink()
            continue
        left.append(file)
        if len(single) < len(rows):
            draft = file.with_name(f".{file.name}")
            with open_writer(draft) as writer:
                writer.write_table(single, row_group_size=GROUP_ROWS)
            draft.replace(file)
            share_as_folder(file)
    return left


def _sequences(file: Path) -> pa.Array:
    return parquet.read_table(file, columns=["sequence"], partitioning=None)["sequence"].combine_chunks()


def place_staged(staging: Path, folder: Path, covered: SequenceRange, mark: str = "") -> list[Path]:
    """Move a batch's staged files to their dates; return all files of the batch, including those of an earlier attempt.

    `mark` is the `source_mark` of the source.
    """
    name = f"{covered.first}-{covered.next}{mark}.parquet"
    for dated in sorted(staging.glob("date=*")):
        parts = sorted(dated.glob("[0-9]*.parquet"))
        if not parts:
            continue
        file = folder / dated.name / name
        make_shared_folder(file.parent)
        if len(parts) == 1:
            parts[0].replace(file)
            share_as_folder(file)
        else:
            _merge(parts, file)
    shutil.rmtree(staging, ignore_errors=True)
    return sorted(folder.glob(f"date=*/{name}"))


def place_refilled(staging: Path, folder: Path, covered: SequenceRange, mark: str) -> list[Path]:
    """Move one writer's staged files to their dates, next to the files that are there; return them.

    A name's range ends later than `covered` if another file has the name.
    """
    files = []
    for part in sorted(staging.glob("date=*/[0-9]*.parquet")):
        day = folder / part.parent.name
        make_shared_folder(day)
        names = (day / f"{covered.first}-{after}{mark}.parquet" for after in itertools.count(covered.next))
        file = next(name for name in names if not name.exists())
        part.replace(file)
        share_as_folder(file)
        files.append(file)
    shutil.rmtree(staging, ignore_errors=True)
    return files


def held_sequences(folder: Path, mark: str, covered: SequenceRange) -> set[int]:
    """Return the sequences of one source in a range that a stream's history holds."""
    held: set[int] = set()
    for file in history_files(folder):
        first, after = file_range(file)
        if file_mark(file) == mark and first < covered.next and after > covered.first:
            held.update(sequence for sequence in _sequences(file).to_pylist() if sequence in covered)
    return held


def read_sequences(file: Path) -> set[int]:
    """Return the source sequences of a file's rows."""
    return set(_sequences(file).to_pylist())


def _merge(parts: Iterable[Path], file: Path) -> None:
    """Concatenate files by row group, so that memory holds one group at a time."""
    draft = file.with_name(f".{file.name}")
    with open_writer(draft) as writer:
        for part in parts:
            source = parquet.ParquetFile(part)
            for group in range(source.num_row_groups):
                writer.write_table(source.read_row_group(group))
    draft.replace(file)
    share_as_folder(file)


def history_files(folder: Path) -> list[Path]:
    """Return the files of a stream's history, by date; other files in its folder are not ours."""
    return sorted(file for file in folder.glob("date=*/[0-9]*.parquet") if _FILE.fullmatch(file.name))


def file_range(file: Path) -> tuple[int, int]:
    """Return the range of source sequences in a file's name."""
    first, after = file.stem.split("-")[:2]
    return int(first), int(after)


def file_mark(file: Path) -> str:
    """Return the `source_mark` in a file's name."""
    return "".join(f"-{part}" for part in file.stem.split("-")[2:])


def remove_before(folder: Path, date: str) -> int:
    """Delete the days before an ISO date; return their number."""
    old = [day for day in folder.glob("date=????-??-??") if day.name.removeprefix("date=") < date]
    for day in old:
        remove_files(day, *FILES)
    return len(old)
