"""Compaction of the history on disk: crashes, open readers, restored states, retention, and several streams."""

import contextlib
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import duckdb
import pytest

from sr_assets.adapters import crash_points
from sr_assets.adapters.crash_points import Point
from sr_assets.adapters.published.compaction import describe
from sr_assets.adapters.published.history import StagedFiles, place_staged, stream_folder
from sr_assets.adapters.state.checkpoint import read_about, restore_checkpoint, write_checkpoint
from sr_assets.adapters.state.records import StreamState
from sr_assets.domain.history_layout import HOUR_NS
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange
from sr_assets.settings import load_settings
from sr_assets.stages.site import Site
from sr_assets.stages.tracking.node_snapshots import HistoryCompaction, remove_replaced

SITE = "london"
#: 2026-01-01T00:00Z.
BEGIN_NS = 1_767_225_600 * 10**9
_NODES = 3
_COPIED: Final = """
INSERT INTO nodes (stream, node, first_seen_ns, seen_ns, copied_ns, status, status_since_ns, times_retired, transition)
SELECT $1, $2, $3, $3, $3, 'up', $3, 0, 1
"""
#: A batch: hours of its messages since BEGIN_NS.
Batch = list[int]


class History:
    """A home with one site, whose batches are written as a run writes them."""

    def __init__(self, folder: Path, streams: tuple[str, ...] = ("A",), **top: Any) -> None:
        file = folder / "replication.yaml"
        entries = [
            f"{{name: {SITE}, stream: {stream}, source_url: a:1, target_url: b:1, target_stream: T{stream},"
            " inspect_field: s, inspect_duration: 1h}"
            for stream in streams
        ]
        file.write_text(
            "\n".join(["name: r", f"streams: [{', '.join(entries)}]", *(f"{k}: {v}" for k, v in top.items())])
        )
        self.settings = load_settings(file, {"SR_ASSETS_HOME": str(folder / "home")})
        self.home = self.settings.home.resolve()
        self.written: dict[str, list[int]] = {stream: [] for stream in streams}

    @contextlib.contextmanager
    def open(self) -> Iterator[Site]:
        """Open the site, whose state knows all written messages."""
        with Site(self.settings, SITE, owner="test", run_id="test", wait_seconds=0) as site:
            with site.state.transaction():
                for stream, written in self.written.items():
                    site.state.save_stream(StreamState(stream, 1, len(written) + 1, watermark_ns=BEGIN_NS, as_of_ns=1))
            yield site

    def add(self, site: Site, hours: Batch, stream: str = "A") -> None:
        """Write and index a batch."""
        first = len(self.written[stream]) + 1
        messages = [
            Message(first + n, BEGIN_NS + hour * HOUR_NS + first + n, "s", b"", b"{}") for n, hour in enumerate(hours)
        ]
        senders: Mapping[int, str | None] = {message.sequence: f"n{message.sequence % _NODES}" for message in messages}
        staging, covered = self.home / "staging", SequenceRange(first, first + len(hours))
        with StagedFiles(staging, 0) as staged:
            staged.add(messages, senders)
        files = place_staged(staging, stream_folder(self.home, SITE, stream), covered)
        with site.state.transaction():
            site.state.snapshot_index(stream).add(covered.first, covered.next, [*map(describe, files)])
            for message in messages:
                values = [stream, senders[message.sequence], message.stored_ns]
                site.state.connection.execute("DELETE FROM nodes WHERE stream = ? AND node = ?", values[:2])
                site.state.connection.execute(_COPIED, values)
        self.written[stream] += senders

    def compact(self, site: Site, hour: float, stream: str = "A") -> None:
        """Compact as at the end of a run, with a clock of `hour` since BEGIN_NS."""
        (settings,) = (each for each in site.streams if each.stream == stream)
        HistoryCompaction(settings, site.state, site).compact(BEGIN_NS + int(hour * HOUR_NS))

    def settle(self, site: Site, hour: float) -> None:
        """Compact, publish the result, and delete the files that were merged."""
        self.compact(site, hour)
        site.publish()
        remove_replaced(site, site.state, "A")

    def checkpoint(self, site: Site) -> Path:
        """Write a checkpoint of the open site."""
        file = self.home / "checkpoint"
        identities = {"A": ("r", SITE)}
        arguments: Any = {"replicator": "r", "site": SITE, "at_ns": 1, "identities": identities, "paused": frozenset()}
        write_checkpoint(site.state.connection.raw, file, **arguments)
        return file

    def checkpoint_of_another(self, change: str) -> Path:
        """Write a batch of four messages, and the checkpoint of a home whose state differs by some statements."""
        with self.open() as site:
            self.add(site, [0] * 4)
        state, kept = self.home / "sites", self.home / "kept"
        shutil.copytree(state, kept)
        with self.open() as site:
            for statement in change.split("; "):
                site.state.connection.execute(statement)
            file = self.checkpoint(site)
        shutil.rmtree(state)
        kept.rename(state)
        return file

    def restore(self, file: Path) -> None:
        """Restore a checkpoint."""
        restore_checkpoint(file, read_about(file, "r", SITE), self.home / "sites" / SITE, self.home)

    def files(self, stream: str = "A") -> list[Path]:
        """Return the stream's files on disk."""
        return sorted(stream_folder(self.home, SITE, stream).glob("date=*/*.parquet"))

    def check(self, stream: str = "A", since: int = 1) -> None:
        """Check the published rows: each message once, and the newest of each node."""
        with duckdb.connect(str(self.home / "fleet.duckdb"), read_only=True) as reader:
            self.check_reader(reader, stream, since)

    def check_reader(
        self, reader: duckdb.DuckDBPyConnection, stream: str = "A", since: int = 1, until: int = 1_000_000
    ) -> None:
        """Check the rows of an open reader, with sequences from `since` to `until`."""
        written = [sequence for sequence in self.written[stream] if since <= sequence <= until]
        history = reader.execute(
            "SELECT sequence FROM node_snapshot_history WHERE stream = ? ORDER BY sequence", [stream]
        ).fetchall()
        assert [sequence for (sequence,) in history] == written
        newest = reader.execute("SELECT node, sequence FROM node_snapshots WHERE stream = ?", [stream]).fetchall()
        assert dict(newest) == {f"n{sequence % _NODES}": sequence for sequence in written}


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path)


@pytest.fixture
def crash(monkeypatch: pytest.MonkeyPatch) -> Callable[[Point, int], None]:
    """End the process at the n-th passage of a point, once."""

    def at(point: Point, count: int) -> None:
        left = [count]

        def hook(reached: Point) -> None:
            left[0] -= reached is point
            if reached is point and left[0] == 0:
                raise KeyboardInterrupt

        monkeypatch.setattr(crash_points, "hook", hook)

    return at


@pytest.mark.parametrize("seed", (0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))))
def test_random_batches_keep_each_row_once(history: History, seed: int) -> None:
    chance, hour = random.Random(seed), 0
    with history.open() as site:
        while hour < 30:
            after = hour + chance.choice((0, 0, 0, 1, 3))
            rows = sorted(chance.choices(range(hour, after + 1), k=chance.choice((1, 2, 50))))
            history.add(site, rows)
            hour = after
            if chance.random() < 0.5:
                history.settle(site, hour)
                history.check()
        history.settle(site, 48)
    history.check()
    assert len(history.files()) == len({file.parent for file in history.files()})
    assert max(describe(file).level for file in history.files()) <= 3


def test_batch_across_an_hour_is_cut_when_the_hour_closes(history: History) -> None:
    with history.open() as site:
        for hours in ([0, 0], [0, 1], [1]):
            history.add(site, hours)
        history.settle(site, 1)
        history.check()
        described = [describe(file) for file in history.files()]
        assert sorted((file.first_hour - BEGIN_NS // HOUR_NS, file.rows, file.level) for file in described) == [
            (0, 3, 1),
            (1, 1, 0),
            (1, 1, 1),
        ]
        history.compact(site, 2)
        site.publish()
    history.check()


@pytest.mark.parametrize("batches", ([[0]], [[0], [0]]))
def test_row_of_one_node_survives_the_end_of_the_day(history: History, batches: list[Batch]) -> None:
    with history.open() as site:
        for batch in batches:
            history.add(site, batch)
        for hour in (1, 24, 24):
            history.settle(site, hour)
            history.check()
    assert len(history.files()) == 1


@pytest.mark.parametrize("point", ((Point.MERGED_HISTORY, 1), (Point.MERGED_HISTORY, 2), (Point.REPLACED_HISTORY, 1)))
@pytest.mark.parametrize("published", (False, True))
def test_crash_in_a_merge_keeps_each_row_once(
    history: History, crash: Callable[[Point, int], None], point: tuple[Point, int], *, published: bool
) -> None:
    with history.open() as site:
        for hours in ([0, 0], [0, 1], [0, 0, 1]):
            history.add(site, hours)
        site.publish()
        crash(*point)
        with pytest.raises(KeyboardInterrupt):
            history.compact(site, 1)
    with history.open() as site:
        if published:
            site.publish()
            history.check()
        history.add(site, [1, 1])
        history.compact(site, 1)
        site.publish()
        history.check()
        remove_replaced(site, site.state, "A")
        history.check()
    assert len(history.files()) == 3


def test_open_reader_finishes_and_its_files_stay(history: History) -> None:
    with history.open() as site:
        for _ in range(4):
            history.add(site, [0])
        site.publish()
        with duckdb.connect(str(history.home / "fleet.duckdb"), read_only=True) as reader:
            history.compact(site, 1)
            remove_replaced(site, site.state, "A")
            assert len(history.files()) == 5
            site.publish()
            remove_replaced(site, site.state, "A")
            assert len(history.files()) == 5
            history.check_reader(reader)
            # The reader's view names no later file.
            history.add(site, [1])
            history.add(site, [1])
            history.settle(site, 2)
            assert len(history.files()) == 6
            history.check_reader(reader, until=4)
        remove_replaced(site, site.state, "A")
        assert len(history.files()) == 2
    history.check()


@pytest.mark.parametrize(
    ("day", "deleted"),
    (
        (1, 0),
        (24, 1),
        (1, 4),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((24, 0), (1, 1), (24, 4))),
    ),
)
def test_restored_older_state_counts_each_row_once(history: History, deleted: int, day: int) -> None:
    """Of the parts that the older state lists, none, one or all were deleted since."""
    with history.open() as site:
        for _ in range(4):
            history.add(site, [0])
        file, parts = history.checkpoint(site), history.files()
        for hour in {1, day}:
            history.compact(site, hour)
        for part in parts[:deleted]:
            part.unlink()
    history.restore(file)
    with history.open() as site:
        for _ in range(2):
            history.settle(site, 1)
            history.check()
        history.compact(site, 24)
        history.settle(site, 24)
    history.check()
    assert len(history.files()) == 1
    assert describe(history.files()[0]).level <= 3


@pytest.mark.parametrize("lost", (False, True), ids=("own state", "no state"))
def test_file_with_the_name_of_another_home_keeps_its_rows(history: History, lost: bool) -> None:
    """The other home has the node's newest row in a file that this one lacks."""
    file = history.checkpoint_of_another(
        "UPDATE snapshots SET file = replace(file, '/1-5.', '/4-5.') WHERE node = 'n1'"
    )
    if lost:
        (history.home / "sites" / SITE / "state.duckdb").unlink()
    history.restore(file)
    with history.open() as site:
        history.settle(site, 1)
    history.check()


@pytest.mark.parametrize(
    ("change", "kept"),
    (
        ("UPDATE nodes SET copied_ns = copied_ns - 1", True),
        ("UPDATE nodes SET copied_ns = copied_ns + 1", False),
        ("DELETE FROM nodes", False),
        # A retired node keeps its newest row.
        ("UPDATE nodes SET copied_ns = NULL", True),
        ("UPDATE nodes SET copied_ns = NULL; DELETE FROM snapshots", True),
        ("UPDATE nodes SET copied_ns = NULL; UPDATE snapshots SET sequence = sequence + 1", False),
        ("UPDATE nodes SET copied_ns = NULL; UPDATE snapshots SET file = replace(file, '1-5', '1-5-7-8')", False),
    ),
    ids=(
        "older",
        "copied elsewhere",
        "forgotten",
        "retired",
        "without a row",
        "retired elsewhere",
        "of another source",
    ),
)
def test_restored_index_has_the_nodes_whose_newest_row_is_here(history: History, change: str, kept: bool) -> None:
    history.restore(history.checkpoint_of_another(change))
    with history.open() as site:
        rows = site.state.connection.rows("SELECT node, sequence FROM snapshots ORDER BY node")
    assert rows == ([("n0", 3), ("n1", 4), ("n2", 2)] if kept else [])


@pytest.mark.parametrize("hour", (1, 24))
def test_older_state_keeps_the_rows_that_were_merged_after_it(history: History, hour: int) -> None:
    """The state comes from a copied folder."""
    with history.open() as site:
        for _ in range(4):
            history.add(site, [0])
    state, copied = history.home / "sites", history.home / "copied"
    shutil.copytree(state, copied)
    with history.open() as site:
        history.settle(site, hour)
    shutil.rmtree(state)
    copied.rename(state)
    with history.open() as site:
        for _ in range(2):
            history.settle(site, hour)
            history.check()
    assert len(history.files()) == 1


def test_file_with_the_name_of_a_replaced_one_keeps_its_rows(history: History) -> None:
    """An older state lists the merged file, which was merged again, and its part, whose name the last file has."""
    with history.open() as site:
        history.add(site, [0])
        history.compact(site, 24)
    part, merged = history.files()
    merged.replace(part)
    with history.open() as site:
        for _ in range(2):
            history.settle(site, 24)
            history.check()
    assert len(history.files()) == 1


@pytest.mark.parametrize(
    ("batches", "hours"),
    (([[0]] * 4, [1]), ([[0, 0], [0, 1, 1], [1, 2, 2]], [1, 2])),
    ids=("whole parts", "parts divided at an hour"),
)
def test_lost_state_adopts_merged_files_without_their_parts(
    history: History, batches: list[Batch], hours: list[int]
) -> None:
    with history.open() as site:
        for batch in batches:
            history.add(site, batch)
        for hour in hours:
            history.compact(site, hour)
    (history.home / "sites" / SITE / "state.duckdb").unlink()
    with history.open() as site:
        history.compact(site, hours[-1])
        site.publish()
        history.check()
        remove_replaced(site, site.state, "A")
    history.check()
    files = list(map(describe, history.files()))
    assert sum(file.rows for file in files) == sum(map(len, batches))
    assert all(file.level for file in files)


def test_deleted_file_loses_only_its_own_rows(history: History) -> None:
    with history.open() as site:
        for hour in (0, 0, 1, 1):
            history.add(site, [hour] * 3)
        history.files()[0].unlink()
        history.compact(site, 2)
        site.publish()
    history.check(since=4)


def test_clock_jump_backwards_rewrites_no_row_too_often(history: History) -> None:
    with history.open() as site:
        for hour in (5, 5, 6, 2, 2, 6, 3, 6, 7):
            history.add(site, [hour, hour])
            history.settle(site, max(6, hour))
            history.check()
        history.settle(site, 24)
    history.check()
    (file,) = history.files()
    assert describe(file).level <= 3


def test_two_streams_compact_their_own_files(tmp_path: Path) -> None:
    history = History(tmp_path, ("A", "B"))
    with history.open() as site:
        for stream in ("A", "B", "A", "B", "A"):
            history.add(site, [0, 0], stream)
        history.compact(site, 1, "A")
        site.publish()
        for stream, count in (("A", 1), ("B", 2)):
            remove_replaced(site, site.state, stream)
            history.check(stream)
            assert len(history.files(stream)) == count


def test_copies_that_wait_keep_their_hour_open(history: History) -> None:
    with history.open() as site:
        history.add(site, [0])
        history.add(site, [0])
        with site.state.transaction():
            site.state.connection.execute("INSERT INTO copy_queue VALUES ('A', 0, 1, 9, 'n', 1)")
        history.compact(site, 30)
        assert len(history.files()) == 2
        with site.state.transaction():
            site.state.connection.execute("DELETE FROM copy_queue")
        history.compact(site, 30)
        assert len(history.files()) == 3


def test_retention_deletes_merged_files(tmp_path: Path) -> None:
    history = History(tmp_path, snapshots="{retention: 2d}")
    with history.open() as site:
        for hour in (0, 0, 24, 24):
            history.add(site, [hour])
        history.settle(site, 48)
        assert len(history.files()) == 2
        history.compact(site, 72)
        site.publish()
    history.check(since=3)
    assert len(history.files()) == 1


def test_state_of_an_earlier_build_learns_rows_and_hours(history: History) -> None:
    with history.open() as site:
        for _ in range(2):
            history.add(site, [0])
        site.state.connection.execute("UPDATE history SET rows = NULL, first_hour = NULL, last_hour = NULL")
        history.settle(site, 1)
    history.check()
    assert len(history.files()) == 1
