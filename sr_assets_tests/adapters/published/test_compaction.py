"""Compaction: the planned merges, the number of rewrites of a row, and the merged file."""

import random
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from sr_assets.adapters.published import compaction
from sr_assets.adapters.published.compaction import FILES_OF_A_LEVEL, Merge, is_abandoned, merge, plan_merges
from sr_assets.adapters.published.history import SCHEMA, copied_sequences, open_writer, source_mark

DAY = "date=1970-01-01"


def row(sequence: int, node: str) -> dict[str, object]:
    return {
        "node": node,
        "sequence": sequence,
        "stored_at": sequence,
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


def test_row_is_rewritten_three_times_at_most() -> None:
    levels: dict[Path, int] = {}
    rewritten: Counter[int] = Counter()
    covered: dict[Path, list[int]] = {}

    def merge_planned(*, over: bool) -> None:
        for planned in plan_merges(levels, over=over):
            covered[planned.whole] = [batch for part in planned.parts for batch in covered.pop(part)]
            rewritten.update(covered[planned.whole])
            for part in planned.parts:
                del levels[part]
            levels[planned.whole] = planned.level

    for batch in range(3_000):
        file = Path(DAY) / f"{batch}-{batch + 1}.parquet"
        levels[file], covered[file] = 0, [batch]
        merge_planned(over=False)
        assert len(levels) < 3 * FILES_OF_A_LEVEL
    merge_planned(over=True)
    merge_planned(over=True)
    assert list(levels) == [Path(DAY) / "0-3000.parquet"]
    assert sorted(covered[Path(DAY) / "0-3000.parquet"]) == list(range(3_000))
    assert max(rewritten.values()) == 3


@pytest.mark.parametrize("group_rows", (50_000, 100), ids=("in memory", "spread"))
def test_merged_file_has_every_row_once_sorted_by_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_rows: int
) -> None:
    monkeypatch.setattr(compaction, "GROUP_ROWS", group_rows)
    chosen = random.Random(1)
    nodes = [f"n{chosen.randrange(40):02}" for _ in range(1_000)]
    parts = [write(tmp_path, first, nodes[first : first + 50]) for first in range(0, 1_000, 50)]
    # A stream that is copied again repeats rows.
    parts.append(write(tmp_path, 20, nodes[20:30], after=31))
    planned = Merge(tuple(parts), 1)
    assert planned.whole == tmp_path / DAY / "0-1000.parquet"
    assert merge(planned, tmp_path / "scratch") == 1_000
    assert rows(planned.whole) == sorted((node, sequence) for sequence, node in enumerate(nodes))
    about = parquet.read_metadata(planned.whole)
    sizes = [about.row_group(n).num_rows for n in range(about.num_row_groups)]
    assert max(sizes) <= group_rows
    assert len(sizes) == max(1, round(1_000 / group_rows) + (group_rows < 1_000))
    assert all(part.exists() for part in parts)
    assert sorted(tmp_path.rglob(".*")) == []
    assert not (tmp_path / "scratch").exists()


def test_file_of_an_interrupted_merge_is_abandoned(tmp_path: Path) -> None:
    parts = [write(tmp_path, first, ["a"]) for first in (1, 2)]
    planned = Merge(tuple(parts), 1)
    merge(planned, tmp_path / "scratch")
    listed = dict.fromkeys(parts, 0)
    assert is_abandoned(planned.whole, listed)
    assert not is_abandoned(planned.whole, {planned.whole: 1})
    assert not is_abandoned(parts[0], listed)


def test_files_of_different_sources_are_not_merged(tmp_path: Path) -> None:
    marks = ("", source_mark(7, 1), source_mark(7, 2))
    files = [write(tmp_path, first, ["a", "b"], mark) for mark in marks for first in (1, 3)]
    merges = list(plan_merges(dict.fromkeys(files, 0), over=True))
    assert [planned.whole.name for planned in merges] == [f"1-5{mark}.parquet" for mark in marks]
    for planned in merges:
        merge(planned, tmp_path / "scratch")
        for part in planned.parts:
            part.unlink()
    assert [copied_sequences(tmp_path, mark, 0) for mark in marks] == [[1, 2, 3, 4]] * 3
    assert list(plan_merges({planned.whole: planned.level for planned in merges}, over=True)) == []


def test_merged_file_replaces_no_other_file(tmp_path: Path) -> None:
    """Files of a refill may lie inside the range of an older file."""
    day = tmp_path / DAY
    parts = [day / f"{first}-{first + 1}.parquet" for first in range(1, 41)]
    older = day / "1-41.parquet"
    (planned,) = plan_merges({**dict.fromkeys(parts, 0), older: 1}, over=False)
    assert planned.whole == day / "1-42.parquet"
    (planned,) = plan_merges({day / "1-5.parquet": 1, day / "2-3.parquet": 0}, over=True)
    assert planned.whole == day / "1-6.parquet"
