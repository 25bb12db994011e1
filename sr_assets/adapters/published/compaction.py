"""Merging files of the Parquet history into files sorted by node, and the merged ones that readers may still have open.

In a sorted file, a node's rows are in few row groups, whose statistics name it, so a lookup reads little. The metadata of a
merged file has its level and the names of its parts.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from sr_assets.adapters.crash_points import Point, reach
from sr_assets.adapters.private import share_as_folder
from sr_assets.adapters.published.history import (
    GROUP_ROWS,
    file_mark,
    file_range,
    history_files,
    open_writer,
    read_sequences,
)
from sr_assets.adapters.published.manifest import earlier_file, is_open, read_manifest, shows
from sr_assets.adapters.published.publication import Publication, publication_folder, read_publication
from sr_assets.domain.history_layout import HOUR_NS, HistoryFile, Merge

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Large rows make smaller row groups, because one group is in memory at a time.
_GROUP_BYTES: Final = 64 << 20
#: Up to this size the scratch files are not compressed, which saves 40 % of a merge's time.
_SCRATCH_BYTES: Final = 2 << 30
_ORDER: Final = [("node", "ascending"), ("sequence", "ascending")]
_PARTS: Final = "sr_assets.parts"
_LEVEL: Final = "sr_assets.level"
_HOUR_US: Final = HOUR_NS // 1_000
_DUPLICATE: Final = -1


def describe(file: Path) -> HistoryFile:
    """Return the rows, the hours and the level of a file of the history."""
    opened = parquet.ParquetFile(file)
    about, first = opened.metadata.metadata or {}, file_range(file)[0]
    # A merged file of an earlier build has no level.
    level = int(about.get(_LEVEL.encode(), 1 if _PARTS.encode() in about else 0))
    hours = pc.min_max(_stored_us(opened.read(columns=["stored_at"])))
    first_hour, last_hour = ((hours[at].as_py() or 0) // _HOUR_US for at in ("min", "max"))
    return HistoryFile(file, first, file_mark(file), level, opened.metadata.num_rows, first_hour, last_hour)


def merge(planned: Merge, scratch: Path) -> list[HistoryFile]:
    """Write the merged files next to their parts, sorted by node and sequence; return them.

    `scratch` is a folder for rows that do not fit into memory; it is deleted afterwards.
    """
    parts = [part.path for part in planned.parts]
    size_bytes = _size_bytes(parts)
    if planned.rows <= GROUP_ROWS and size_bytes <= _GROUP_BYTES:
        rows = pa.concat_tables(parquet.ParquetFile(part).read().replace_schema_metadata(None) for part in parts)
        rows = rows.sort_by(_ORDER)
        rows = rows.filter(pa.array(~_is_repeated(rows)))
        later = _is_later(rows, planned.cut_hour)
        sides = [rows.filter(pa.array(~later)), rows.filter(pa.array(later))]
        return [_write(planned, [side], later=bool(number)) for number, side in enumerate(sides) if len(side)]
    of_rows, counts = _group(_read_keys(planned), planned.cut_hour, size_bytes)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        groups = _spread(parts, of_rows, scratch, "zstd" if size_bytes > _SCRATCH_BYTES else None)
        return [
            _write(planned, itertools.islice(groups, count), later=bool(number))
            for number, count in enumerate(counts)
            if count
        ]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def is_abandoned(file: Path, listed: Collection[Path]) -> bool:
    """Return whether an unlisted file comes from an interrupted merge: all of its parts are still listed."""
    parts = parquet.read_metadata(file).metadata or {}
    names = parts.get(_PARTS.encode())
    return names is not None and all(file.with_name(name) in listed for name in json.loads(names))


def hold_rows(files: Iterable[Path], other: Path) -> bool:
    """Return whether files have all rows of another one: merges up to an hour divide a file's rows between two."""
    first, after = file_range(other)
    near = [
        file
        for file in files
        if file.parent == other.parent
        and file_mark(file) == file_mark(other)
        and (file_range(file)[0] < after and first < file_range(file)[1])
    ]
    return bool(near) and read_sequences(other) <= set().union(*map(read_sequences, near))


def merged_first(files: Iterable[Path]) -> list[HistoryFile]:
    """Describe files, merged ones before their parts: of one level, the smaller ones after a merge's hour are first."""
    return sorted(map(describe, files), key=lambda file: (-file.level, file.rows))


def whole_files(folder: Path) -> list[HistoryFile]:
    """Return the files of a stream's history without parts of merged files, which wait for their deletion."""
    whole: list[HistoryFile] = []
    for file in merged_first(history_files(folder)):
        if not hold_rows((other.path for other in whole), file.path):
            whole = [*(other for other in whole if not hold_rows([file.path], other.path)), file]
    return whole


def _write(planned: Merge, groups: Iterable[pa.Table], *, later: bool) -> HistoryFile:
    """Write one merged file, a row group for each sorted table; its name has the range of its sequences."""
    folder, mark, level = planned.parts[0].path.parent, planned.parts[0].mark, planned.level(later=later)
    draft = folder / f".merging{mark}-{int(later)}.parquet"
    about = {_PARTS: json.dumps([part.path.name for part in planned.parts]), _LEVEL: str(level)}
    ranges: list[tuple[int, int, int, int, int]] = []
    with open_writer(draft, about) as writer:
        for rows in groups:
            writer.write_table(rows, row_group_size=len(rows))
            sequences, hours = pc.min_max(rows["sequence"]).as_py(), pc.min_max(_stored_us(rows)).as_py()
            ranges.append((len(rows), sequences["min"], sequences["max"], hours["min"], hours["max"]))
    counts, firsts, lasts, first_us, last_us = zip(*ranges, strict=True)
    first = min(firsts)
    # Other files, of a refill or waiting for their deletion, may have the range.
    names = (folder / f"{first}-{after}{mark}.parquet" for after in itertools.count(max(lasts) + 1))
    whole = next(name for name in names if not name.exists())
    draft.replace(whole)
    share_as_folder(whole)
    reach(Point.MERGED_HISTORY)
    return HistoryFile(whole, first, mark, level, sum(counts), min(first_us) // _HOUR_US, max(last_us) // _HOUR_US)


def _read_keys(planned: Merge) -> pa.Table:
    """Return the columns that decide the row group of each row."""
    columns = ["node", "sequence", *(["stored_at"] if planned.cut_hour is not None else [])]
    return pa.concat_tables(parquet.ParquetFile(part.path).read(columns=columns) for part in planned.parts)


def _size_bytes(parts: Sequence[Path]) -> int:
    """Return the uncompressed size of the rows."""
    return sum(
        about.row_group(number).total_byte_size
        for about in map(parquet.read_metadata, parts)
        for number in range(about.num_row_groups)
    )


def _stored_us(rows: pa.Table) -> pa.ChunkedArray:
    """Return the stored times in unix microseconds."""
    return rows["stored_at"].cast(pa.int64())


def _is_later(rows: pa.Table, cut_hour: int | None) -> NDArray[np.bool_]:
    if cut_hour is None:
        return np.zeros(len(rows), bool)
    return np.asarray(pc.greater_equal(_stored_us(rows), cut_hour * _HOUR_US))


def _is_repeated(ordered: pa.Table) -> NDArray[np.bool_]:
    """Return whether each sorted row has the node and the sequence of the row before."""
    repeated = np.zeros(len(ordered), bool)
    if len(ordered) > 1:
        same = [
            pc.equal(ordered[name].slice(1), ordered[name].slice(0, len(ordered) - 1)) for name in ("node", "sequence")
        ]
        repeated[1:] = np.asarray(pc.fill_null(pc.and_(*same), fill_value=False))
    return repeated


def _group(keys: pa.Table, cut_hour: int | None, size_bytes: int) -> tuple[NDArray[np.int32], tuple[int, int]]:
    """Distribute rows over row groups of limited rows and bytes.

    Returns the group of each row in file order, or `_DUPLICATE`, and the number of groups before and from the cut on.
    """
    order = pc.sort_indices(keys, sort_keys=_ORDER).to_numpy()
    order = order[~_is_repeated(keys.take(order))]
    later = _is_later(keys, cut_hour)[order]
    of_rows, counts = np.full(len(keys), _DUPLICATE, np.int32), (0, 0)
    for rows in (order[~later], order[later]):
        share_bytes = size_bytes * len(rows) // max(1, len(keys))
        count = max(-(-len(rows) // GROUP_ROWS), -(-share_bytes // _GROUP_BYTES))
        of_rows[rows] = sum(counts) + np.arange(len(rows), dtype=np.int64) * count // max(1, len(rows))
        counts = (counts[1], count)
    return of_rows, counts


def _spread(
    parts: Sequence[Path], groups: NDArray[np.int32], scratch: Path, compression: str | None
) -> Iterator[pa.Table]:
    """Yield the sorted rows of each group, which are first written to a scratch file each."""
    writers: dict[int, pa.ipc.RecordBatchFileWriter] = {}
    try:
        for rows, numbers in _read(parts, groups):
            for number in np.unique(numbers[numbers != _DUPLICATE]).tolist():
                if number not in writers:
                    options = pa.ipc.IpcWriteOptions(compression=compression)
                    writers[number] = pa.ipc.new_file(str(scratch / f"{number}"), rows.schema, options=options)
                writers[number].write_table(rows.filter(pa.array(numbers == number)))
    finally:
        for writer in writers.values():
            writer.close()
    for number in sorted(writers):
        with pa.OSFile(str(scratch / f"{number}")) as file:
            yield pa.ipc.open_file(file).read_all().sort_by(_ORDER)


def _read(parts: Sequence[Path], groups: NDArray[np.int32]) -> Iterator[tuple[pa.Table, NDArray[np.int32]]]:
    """Yield the rows of the files by row group, with their target groups."""
    at = 0
    for part in parts:
        opened = parquet.ParquetFile(part)
        for number in range(opened.metadata.num_row_groups):
            rows = opened.read_row_group(number).replace_schema_metadata(None)
            yield rows, groups[at : at + len(rows)]
            at += len(rows)


def unread_files(home: Path, site: str, files: Sequence[str]) -> list[str]:
    """Return the files, relative to the home, that no view names: neither the current one nor one that is open.

    A view names no file that was written after it.
    """
    folder, manifest = publication_folder(home, site), read_manifest(home)
    publication = read_publication(folder)
    if publication is None or not shows(home, site, publication.token, manifest):
        return []
    written_ns: list[int] = []
    for number in manifest.numbers:
        link = earlier_file(home, number)
        if number == manifest.number:
            continue
        try:
            if is_open(link):
                written_ns.append(link.stat().st_mtime_ns)
        except FileNotFoundError:
            # The disk has no hard links, so it is unknown whether the file is open.
            return []
    shown = _shown_files(folder, publication)
    return [file for file in files if file not in shown and _replaced_later(home / file, written_ns)]


def _shown_files(folder: Path, publication: Publication) -> set[str]:
    shown = set(publication.history)
    for name in publication.files.get("history_files", ()):
        shown.update(parquet.read_table(folder / name, columns=["file"], partitioning=None)["file"].to_pylist())
    return shown


def _replaced_later(file: Path, written_ns: Sequence[int]) -> bool:
    return not written_ns or not file.exists() or file.stat().st_mtime_ns > max(written_ns)
