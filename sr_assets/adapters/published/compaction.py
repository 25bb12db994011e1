"""Compaction of the Parquet history into few files sorted by node; each row is rewritten a few times at most.

A batch writes a file of level 0. On a day that is still written to, 40 files of one level become one file of the next;
once the day is over, all files become one. In a sorted file, a node's rows are in few row groups, whose statistics name
it, so a lookup reads little.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from sr_assets.adapters.private import share_as_folder
from sr_assets.adapters.published.history import GROUP_ROWS, file_mark, file_range, open_writer

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Number of files of a level that become one file of the next.
FILES_OF_A_LEVEL: Final = 40
#: Large rows make smaller row groups, because one group is in memory at a time.
_GROUP_BYTES: Final = 64 << 20
_ORDER: Final = [("node", "ascending"), ("sequence", "ascending")]
_PARTS: Final = "sr_assets.parts"
_DUPLICATE: Final = -1


class Merge(NamedTuple):
    """Files to merge into one, and the level of the result; `widened` makes its name another one than existing files'."""

    parts: tuple[Path, ...]
    level: int
    widened: int = 0

    @property
    def whole(self) -> Path:
        """Path of the merged file: its name has the range of all parts."""
        ranges = [file_range(part) for part in self.parts]
        first, after = min(first for first, _ in ranges), max(after for _, after in ranges) + self.widened
        return self.parts[0].with_name(f"{first}-{after}{file_mark(self.parts[0])}.parquet")


def plan_merges(levels: Mapping[Path, int], *, over: bool) -> Iterator[Merge]:
    """Yield the merges of a day's files, given with their levels.

    `over` means that no more files will be written for the day. Only files of one source are merged with each other.
    """
    by_source: dict[str, list[Path]] = defaultdict(list)
    for file in sorted(levels, key=file_range):
        by_source[file_mark(file)].append(file)
    for files in by_source.values():
        if over:
            if len(files) > 1 or levels[files[0]] == 0:
                yield _planned(files, max(levels[file] for file in files) + 1, levels)
            continue
        of_level: dict[int, list[Path]] = defaultdict(list)
        for file in files:
            of_level[levels[file]].append(file)
        for level, alike in of_level.items():
            if len(alike) >= FILES_OF_A_LEVEL:
                yield _planned(alike, level + 1, levels)


def _planned(files: Sequence[Path], level: int, levels: Mapping[Path, int]) -> Merge:
    """Return the merge of some files; the ranges of refilled files overlap those of others."""
    planned = Merge(tuple(files), level)
    while len(files) > 1 and planned.whole in levels:
        planned = planned._replace(widened=planned.widened + 1)
    return planned


def merge(planned: Merge, scratch: Path) -> int:
    """Write the merged file next to its parts, sorted by node and sequence; return its number of rows.

    `scratch` is a folder for rows that do not fit into memory; it is deleted afterwards.
    """
    whole, draft = planned.whole, planned.whole.with_name(f".{planned.whole.name}")
    groups = _groups(planned.parts)
    about = {_PARTS: json.dumps([part.name for part in planned.parts])}
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        with open_writer(draft, about) as writer:
            for rows in _spread(planned.parts, groups, scratch):
                writer.write_table(rows.sort_by(_ORDER), row_group_size=max(1, len(rows)))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    draft.replace(whole)
    share_as_folder(whole)
    return int((groups != _DUPLICATE).sum())


def is_abandoned(file: Path, listed: Mapping[Path, int]) -> bool:
    """Return whether an unlisted file comes from an interrupted merge: all of its parts are still listed."""
    parts = parquet.read_metadata(file).metadata or {}
    names = parts.get(_PARTS.encode())
    return names is not None and all(file.with_name(name) in listed for name in json.loads(names))


def _groups(parts: Sequence[Path]) -> NDArray[np.int32]:
    """Return the row group of each row, in file order; a repeated row has none."""
    keys, size_bytes = [], 0
    for part in parts:
        opened = parquet.ParquetFile(part)
        keys.append(opened.read(columns=["node", "sequence"]))
        groups = range(opened.metadata.num_row_groups)
        size_bytes += sum(opened.metadata.row_group(number).total_byte_size for number in groups)
    table = pa.concat_tables(keys)
    count = max(1, -(-len(table) // GROUP_ROWS), -(-size_bytes // _GROUP_BYTES))
    order = pc.sort_indices(table, sort_keys=_ORDER).to_numpy()
    groups_of_rows = np.empty(len(table), np.int32)
    groups_of_rows[order] = np.arange(len(table), dtype=np.int64) * count // max(1, len(table))
    ordered = table.take(order)
    same = [pc.equal(column.slice(1), column.slice(0, max(0, len(column) - 1))) for column in ordered.columns]
    groups_of_rows[order[1:][pc.and_(*same).to_numpy()]] = _DUPLICATE
    return groups_of_rows


def _spread(parts: Sequence[Path], groups: NDArray[np.int32], scratch: Path) -> Iterator[pa.Table]:
    """Yield the rows of each group; several groups are first written to a scratch file each."""
    if not groups.any():
        yield pa.concat_tables(rows for rows, _ in _read(parts, groups))
        return
    writers: dict[int, pa.ipc.RecordBatchFileWriter] = {}
    try:
        for rows, numbers in _read(parts, groups):
            for number in np.unique(numbers[numbers != _DUPLICATE]).tolist():
                if number not in writers:
                    options = pa.ipc.IpcWriteOptions(compression="zstd")
                    writers[number] = pa.ipc.new_file(str(scratch / f"{number}"), rows.schema, options=options)
                writers[number].write_table(rows.filter(pa.array(numbers == number)))
    finally:
        for writer in writers.values():
            writer.close()
    for number in sorted(writers):
        with pa.OSFile(str(scratch / f"{number}")) as file:
            yield pa.ipc.open_file(file).read_all()


def _read(parts: Sequence[Path], groups: NDArray[np.int32]) -> Iterator[tuple[pa.Table, NDArray[np.int32]]]:
    """Yield the rows of the files by row group, with their target groups."""
    at = 0
    for part in parts:
        opened = parquet.ParquetFile(part)
        for number in range(opened.metadata.num_row_groups):
            rows = opened.read_row_group(number).replace_schema_metadata(None)
            yield rows, groups[at : at + len(rows)]
            at += len(rows)
