"""A whole run: one at a time per site, closed and published however it ends, and the errors of its work loops."""

import contextlib
import math
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pytest

from sr_assets.adapters.published.manifest import is_published
from sr_assets.adapters.published.tables import SCHEMA_VERSION
from sr_assets.adapters.state.lock import SiteBusyError, lock_owner
from sr_assets.adapters.state.status_file import read_status
from sr_assets.adapters.state.stream_tables import Counter
from sr_assets.domain.errors import EngineLostError, TransientError
from sr_assets.settings import FeedSettings
from sr_assets.stages.replication.batch import CopyBatch
from sr_assets.stages.replication.replica import ReplicaStage
from sr_assets.stages.report import Stage, StreamReport
from sr_assets.stages.run import SiteRun, WorkLoop
from sr_assets.stages.site import Site
from sr_assets.stages.tracking.node_state import NodeStage
from sr_assets_tests.rig import SITE, Rig, in_background, wait_until
from sr_assets_tests.stages.tracking.test_node_advisories import from_sender

SAMPLED = {"inspect_field": "sender", "inspect_duration": "10m"}


def folder(rig: Rig, site: str = SITE) -> Path:
    return rig.home / "sites" / site


def test_locked_site_is_refused_with_its_owner(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream)
    rig.add(stream, name="PARIS")
    with rig.open():
        owner = lock_owner(folder(rig))
        assert owner is not None
        assert owner.startswith("test (pid ")
        with pytest.raises(SiteBusyError, match=r"LONDON is under way: test \(pid \d+\) since \d{4}-"):
            rig.run()
        rig.drain("PARIS")
    assert lock_owner(folder(rig)) is None
    rig.drain()


def test_waiting_run_starts_when_the_site_is_unlocked(rig: Rig) -> None:
    rig.add(rig.make())
    settings = rig.settings()
    entered = threading.Event()

    def open_when_free() -> None:
        with Site(settings, SITE, owner="second", run_id="2", wait_seconds=30):
            entered.set()

    with contextlib.ExitStack() as waiting, rig.open():
        waiting.enter_context(in_background(open_when_free))
        assert not entered.wait(0.3)
    assert entered.is_set()


def test_failed_run_publishes_its_commits_and_closes_the_state(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = rig.make(), rig.make()
    for stream in (first, second):
        rig.publish(stream, from_sender("a"))
    rig.add(first, **SAMPLED)
    rig.add(second)
    run = CopyBatch.run

    def fail_for_second(batch: CopyBatch, *arguments: Any) -> None:
        if batch._stream.stream == second:
            raise MemoryError
        run(batch, *arguments)

    monkeypatch.setattr(CopyBatch, "run", fail_for_second)
    with pytest.raises(MemoryError):
        rig.run()
    assert lock_owner(folder(rig)) is None
    with duckdb.connect(str(folder(rig) / "state.duckdb")):
        pass
    assert [row["node"] for row in rig.rows("last_seen_nodes")] == ["a"]
    assert read_status(folder(rig)).streams[first].next_sequence == 2
    monkeypatch.undo()
    rig.drain()
    assert len(rig.copies(second)) == 1


def test_failing_stream_keeps_its_error_and_leaves_others_running(rig: Rig) -> None:
    good, bad = rig.make(), rig.make()
    rig.create(bad, rig.target, no_ack=True)
    rig.add(bad)
    rig.add(good)
    for stream in (good, bad):
        rig.publish(stream, from_sender("a"))
    reports = rig.run()
    assert reports[good].failure is None
    assert "no_ack" in (reports[bad].failure or "")
    assert len(rig.copies(good)) == 1
    stream_status = rig.row(f"SELECT * FROM replication WHERE stream = '{bad}'")
    assert "no_ack" in stream_status["last_error"]
    since = read_status(folder(rig)).streams[bad].last_error_since_ns
    rig.run()
    assert read_status(folder(rig)).streams[bad].last_error_since_ns == since
    rig.api(f"STREAM.DELETE.{bad}", server=rig.target)
    rig.drain()
    assert rig.row(f"SELECT last_error FROM replication WHERE stream = '{bad}'") == {"last_error": None}


def test_status_holds_position_watermark_and_next_deadline(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, from_sender("a", "b"))
    rig.add(stream, **SAMPLED)
    rig.drain()
    info, stored = rig.info(stream), rig.stored(stream)
    status = read_status(folder(rig)).streams[stream]
    assert (status.created_ns, status.next_sequence, status.source_last_sequence) == (info.created_ns, 3, 2)
    assert status.next_deadline_ns == stored[0].stored_ns + 300 * 10**9
    assert (status.last_error, status.unpublished, status.lag_messages) == (None, 0, 0)
    row = rig.row("SELECT epoch_us(next_deadline) AS deadline, epoch_us(watermark) AS watermark FROM replication")
    assert list(row.values()) == [status.next_deadline_ns // 1000, (status.watermark_ns or 0) // 1000]


def test_interrupted_run_sets_its_watermark_to_the_last_message(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = rig.make()
    rig.publish(stream, from_sender(*"abcdef"))
    rig.add(stream, batch_messages=4, **SAMPLED)
    commit, stored = NodeStage._commit, rig.stored(stream)

    def commit_once(stage: NodeStage, *arguments: Any) -> None:
        if arguments[2].covered.first > 1:
            raise KeyboardInterrupt
        commit(stage, *arguments)

    monkeypatch.setattr(NodeStage, "_commit", commit_once)
    with pytest.raises(KeyboardInterrupt):
        rig.run()
    status = read_status(folder(rig)).streams[stream]
    assert (status.watermark_ns, status.next_sequence, status.lag_messages) == (stored[3].stored_ns, 5, 2)
    assert rig.row("replication")["lag_seconds"] > 0


def test_deleted_or_damaged_published_file_is_rebuilt(rig: Rig) -> None:
    stream, other = rig.make(), rig.make()
    rig.publish(stream, from_sender("a"))
    rig.publish(other, from_sender("b"))
    rig.add(stream, **SAMPLED)
    rig.add(other, name="PARIS", **SAMPLED)
    rig.drain()
    rig.drain("PARIS")
    before = rig.rows("SELECT name, node FROM last_seen_nodes ORDER BY name")
    assert [tuple(row.values()) for row in before] == [(SITE, "a"), ("PARIS", "b")]
    assert is_published(rig.home, SITE)
    published = rig.home / "fleet.duckdb"
    for damaged in (None, b"not a database"):
        published.unlink()
        if damaged is not None:
            published.write_bytes(damaged)
        assert not is_published(rig.home, SITE)
        assert not is_published(rig.home, "PARIS")
        rig.drain()
        assert is_published(rig.home, SITE)
        assert is_published(rig.home, "PARIS")
        assert rig.rows("SELECT name, node FROM last_seen_nodes ORDER BY name") == before


def test_readers_keep_their_version_and_never_block_a_run(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, from_sender("a"))
    rig.add(stream, **SAMPLED)
    rig.drain()
    with duckdb.connect(str(rig.home / "fleet.duckdb"), read_only=True) as reader:
        rig.publish(stream, from_sender("b"))
        rig.drain()
        assert reader.execute("SELECT count(*) FROM last_seen_nodes").fetchall() == [(1,)]
        assert reader.execute("SELECT node FROM node_snapshots").fetchall() == [("a",)]
    assert len(rig.rows("last_seen_nodes")) == 2


def test_stages_run_alone_in_any_order(rig: Rig) -> None:
    stream, advisories = rig.make(), rig.make("ADV")
    rig.publish(stream, from_sender("a"))
    rig.add(stream, advisory={"subject": f"{advisories}.%s.%v"}, **SAMPLED)
    for stage in reversed(Stage):
        rig.drain(stages=[stage])
    assert not rig.stored(advisories)
    rig.drain(stages=[Stage.NODE_ADVISORIES])
    assert len(rig.stored(advisories)) == 1
    assert (rig.row("replication")["queued_messages"], rig.row("replication")["copied_messages"]) == (1, 0)
    rig.drain(stages=[Stage.REPLICA])
    assert len(rig.copies(stream)) == 1
    assert (rig.row("replication")["queued_messages"], rig.row("replication")["copied_messages"]) == (0, 1)


def test_lingering_run_copies_new_messages_then_ends(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, from_sender("a"))
    rig.add(stream)
    rig.drain()
    with in_background(lambda: rig.run(drain_only=False, linger="4s")) as run:
        rig.publish(stream, from_sender("b"))
        wait_until(lambda: len(rig.copies(stream)) == 2, "the second copy")
        rig.publish(stream, from_sender("c"))
    assert len(rig.copies(stream)) == 3
    assert [report.failure for report in run.result().values()] == [None]


def test_removed_streams_stay_in_the_tables(rig: Rig) -> None:
    stream, removed = rig.make(), rig.make()
    for source in (stream, removed):
        rig.publish(source, from_sender("a"))
        rig.add(source, **SAMPLED)
    rig.drain()
    assert len(rig.rows("node_availability")) == 2
    rig.entries.pop()
    rig.drain()
    for table in ("node_availability", "node_snapshots", "replication", "site_summary"):
        assert sorted(row["stream"] for row in rig.rows(table)) == sorted((stream, removed))


def test_run_publishes_its_id_and_time_once_it_is_caught_up(rig: Rig) -> None:
    rig.add(rig.make())
    began = time.time()
    rig.drain()
    info = rig.row("snapshot_info")
    assert (info["run_id"], info["schema_version"]) == ("test", SCHEMA_VERSION)
    assert began <= info["as_of"].timestamp() <= time.time()
    published = rig.home / "fleet.duckdb"
    before = published.stat().st_mtime_ns
    with rig.open() as site:
        site.publish(now=False)
        with site.state.transaction():
            pass
        site.publish(now=False, caught_up=False)
        assert published.stat().st_mtime_ns == before
        site.publish(now=False)
        assert published.stat().st_mtime_ns > before


def test_sightings_wait_longer_for_their_publication_than_events(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, from_sender("a"))
    rig.add(stream, **SAMPLED)
    with rig.open() as site:
        due_at = partial(site.publishing_due_at, caught_up=True, copying=False)
        site.publish()
        assert due_at() == math.inf
        began = time.monotonic()
        with site.state.transaction():
            site.state.nodes(stream).save_blind_spans([])
        sightings_at = due_at()
        with site.state.transaction():
            site.state.outbox(stream).mark_published([], 0)
        assert due_at() + 1 < sightings_at < began + 6


@pytest.mark.parametrize("entry", ({}, SAMPLED), ids=("plain", "sampled"))
def test_run_rests_while_one_stream_works_longer_than_the_other(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, entry: dict[str, Any]
) -> None:
    """Without a pause, the run would do thousands of rounds per second, and slow the copying down."""
    for _ in range(2):
        stream = rig.make()
        rig.publish(stream, from_sender("a"))
        rig.add(stream, **entry)
    copy, ended = ReplicaStage.copy_next, list[str]()

    def copy_slowly(stage: ReplicaStage, *arguments: Any) -> bool:
        busy = copy(stage, *arguments)
        name = threading.current_thread().name
        if name.endswith(stream):
            time.sleep(1)
        ended.append(name)
        return busy

    monkeypatch.setattr(ReplicaStage, "copy_next", copy_slowly)
    with rig.open() as site:
        run = SiteRun(site, {entry.stream: frozenset(Stage) for entry in site.entries}, drain_only=True)
        rounds = sum(1 for _ in run.rounds())
    assert ended[-1].endswith(stream)
    assert rounds < 100


def test_first_successful_step_clears_the_previous_error(tmp_path: Path) -> None:
    entry = FeedSettings.model_validate({"name": "centre", "stream": "ADV", "url": "127.0.0.1:1"})
    errors: list[str | None] = []
    work_loop = WorkLoop(
        StreamReport(entry), tmp_path, frozenset({Stage.ADVISORY_FEED}), on_error=errors.append, on_lost=lambda: None
    )

    def fail() -> bool:
        raise TransientError("gone")

    for step in (lambda: True, lambda: False, fail, fail, lambda: True, lambda: True):
        work_loop.attempt(step)
    assert errors == [None, "centre/ADV: gone", None]
    assert work_loop.take_counts() == {
        Counter.ERRORS: 2,
        Counter.CONNECTION_ERRORS: 2,
        Counter.CONNECTIONS_CLOSED: 1,
        Counter.RECONNECTIONS: 1,
    }
    assert not work_loop.take_counts()

    def lose_engine() -> bool:
        raise EngineLostError("gone")

    work_loop.attempt(lose_engine)
    assert work_loop.take_counts() == {Counter.ERRORS: 1}
