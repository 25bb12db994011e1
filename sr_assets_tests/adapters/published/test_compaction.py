"""Merging files of the history: the merged files, and their parts."""

import random
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from sr_assets.adapters.published import compaction
from sr_assets.adapters.published.compaction import describe, hold_rows, is_abandoned, merge, whole_files
from sr_assets.adapters.published.history import (
    SCHEMA,
    copied_sequences,
    file_mark,
    file_range,
    open_writer,
    source_mark,
)
from sr_assets.domain.history_layout import Merge

DAY = "date=1970-01-01"
#: 300 messages an hour.
_STEP_US = 12_000_000


def row(sequence: int, node: str) -> dict[str, object]:
    return {
        "node": node,
        "sequence": sequence,
        "stored_at": sequence * _STEP_US,
        "subject": "s",
        "payload_bytes": 2,
        "payload": "{}",
        "payload_raw": None,
        "metadata": None,
    }


def write(folder: Path, first: int, nodes: list[str], mark: str = "", *, after: int | None = None) -> Path:
    """Write a batch's file with one message of each node, from a sequence on."""
    file = folder / DAY / f"{first}-{after or first + len(nodes)}{mark}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    with open_writer(file) as writer:
        rows = [row(first + n, node) for n, node in enumerate(nodes)]
        writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), row_group_size=7)
    return file


def rows(file: Path) -> list[tuple[str, int]]:
    read = parquet.read_table(file, columns=["node", "sequence"], partitioning=None)
    return list(zip(read["node"].to_pylist(), read["sequence"].to_pylist(), strict=True))


@pytest.mark.parametrize("cut_hour", (None, 2))
@pytest.mark.parametrize("group_rows", (50_000, 100), ids=("in memory", "spread"))
def test_merged_files_have_every_row_once_sorted_by_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_rows: int, cut_hour: int | None
) -> None:
    monkeypatch.setattr(compaction, "GROUP_ROWS", group_rows)
    chosen = random.Random(1)
    nodes = [f"n{chosen.randrange(40):02}" for _ in range(1_000)]
    parts = [write(tmp_path, first, nodes[first : first + 50]) for first in range(0, 1_000, 50)]
    # A stream that is copied again repeats rows.
    parts.append(write(tmp_path, 20, nodes[20:30], after=31))
    # Sequence 600 is the first of hour 2.
    merged = merge(Merge(tuple(map(describe, parts)), cut_hour), tmp_path / "scratch")
    cut = 1_000 if cut_hour is None else 600
    expected = [(first, after) for first, after in ((0, cut), (cut, 1_000)) if first < after]
    assert [file.path.name for file in merged] == [f"{first}-{after}.parquet" for first, after in expected]
    for file, (first, after) in zip(merged, expected, strict=True):
        assert rows(file.path) == sorted((nodes[sequence], sequence) for sequence in range(first, after))
        about = parquet.read_metadata(file.path)
        sizes = [about.row_group(n).num_rows for n in range(about.num_row_groups)]
        assert max(sizes) <= group_rows
        assert len(sizes) == -(-(after - first) // group_rows)
        assert describe(file.path) == file
    assert all(part.exists() for part in parts)
    assert sorted(tmp_path.rglob(".*")) == []
    assert not (tmp_path / "scratch").exists()


def test_merge_of_one_repeated_row_is_one_row(tmp_path: Path) -> None:
    parts = [write(tmp_path, 5, ["a"]), write(tmp_path, 5, ["a"], after=7)]
    (merged,) = merge(Merge(tuple(map(describe, parts))), tmp_path / "scratch")
    assert merged.path.name == "5-8.parquet"
    assert rows(merged.path) == [("a", 5)]


def test_file_of_an_interrupted_merge_is_abandoned(tmp_path: Path) -> None:
    parts = [write(tmp_path, first, ["a"]) for first in (1, 2)]
    (merged,) = merge(Merge(tuple(map(describe, parts))), tmp_path / "scratch")
    assert is_abandoned(merged.path, parts)
    assert not is_abandoned(merged.path, [merged.path])
    assert not is_abandoned(parts[0], parts)


def test_files_of_different_sources_keep_their_marks(tmp_path: Path) -> None:
    marks = ("", source_mark(7, 1), source_mark(7, 2))
    files = [write(tmp_path, first, ["a", "b"], mark) for mark in marks for first in (1, 3)]
    for mark in marks:
        parts = tuple(describe(file) for file in files if file_mark(file) == mark)
        (merged,) = merge(Merge(parts), tmp_path / "scratch")
        assert (merged.path.name, merged.mark, merged.level) == (f"1-5{mark}.parquet", mark, 1)
        for part in parts:
            part.path.unlink()
    assert [copied_sequences(tmp_path, mark, 0) for mark in marks] == [[1, 2, 3, 4]] * 3


def test_merged_file_replaces_no_other_file(tmp_path: Path) -> None:
    """Files of a refill may lie inside the range of an older file."""
    older = write(tmp_path, 1, ["a"], after=4)
    parts = [write(tmp_path, first, ["b"]) for first in (1, 2, 3)]
    (merged,) = merge(Merge(tuple(map(describe, parts))), tmp_path / "scratch")
    assert merged.path.name == "1-5.parquet"
    assert rows(older) == [("a", 1)]


def test_part_of_a_merged_file_is_no_whole_file(tmp_path: Path) -> None:
    parts = [write(tmp_path, first, ["a"]) for first in (1, 2)]
    other = write(tmp_path, 3, ["a"])
    (merged,) = merge(Merge(tuple(map(describe, parts))), tmp_path / "scratch")
    assert [file.path for file in whole_files(tmp_path)] == [merged.path, other]
    assert hold_rows([merged.path], parts[0])
    assert not hold_rows([merged.path], other)


def test_parts_divided_at_an_hour_are_no_whole_files(tmp_path: Path) -> None:
    parts = [write(tmp_path, first, ["a"] * 10) for first in (285, 295, 305)]
    first, rest = merge(Merge(tuple(map(describe, parts[:2])), 1), tmp_path / "scratch")
    assert (file_range(first.path), file_range(rest.path)) == ((285, 300), (300, 305))
    (second,) = merge(Merge((rest, describe(parts[2]))), tmp_path / "scratch")
    assert {file.path for file in whole_files(tmp_path)} == {first.path, second.path}
