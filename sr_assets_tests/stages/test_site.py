"""A run as a whole: one at a time for a site, closed and published however it ends."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import duckdb
import pytest

from sr_assets.adapters.published.schema import SCHEMA_VERSION
from sr_assets.adapters.state.lock import SiteBusyError, lock_owner
from sr_assets.adapters.state.status_file import read_status
from sr_assets.stages.replication.batch import Batch
from sr_assets.stages.report import Stage
from sr_assets.stages.site import Site, needs_publishing
from sr_assets.stages.tracking.node_state import NodeStage
from sr_assets_tests.rig import SITE, Rig, Sent, wait_until

SAMPLED = {"inspect_field": "sender", "inspect_duration": "10m"}


def from_sender(*names: str) -> list[Sent]:
    return [Sent(json.dumps({"sender": name}).encode()) for name in names]


def folder(rig: Rig, site: str = SITE) -> Path:
    return rig.home / "sites" / site


def test_a_site_under_way_is_refused_with_its_owner_and_free_again_afterwards(rig: Rig) -> None:
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


def test_whoever_waits_for_a_site_gets_it_when_it_is_free(rig: Rig) -> None:
    rig.add(rig.make())
    settings = rig.settings()
    entered = threading.Event()

    def wait_for_it() -> None:
        with Site(settings, SITE, owner="second", run_id="2", wait_seconds=30):
            entered.set()

    with rig.open():
        second = threading.Thread(target=wait_for_it)
        second.start()
        assert not entered.wait(0.3)
    second.join()
    assert entered.is_set()


def test_a_run_that_ends_with_an_exception_publishes_what_it_committed_and_closes_everything(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = rig.make(), rig.make()
    for stream in (first, second):
        rig.publish(stream, from_sender("a"))
    rig.add(first, **SAMPLED)
    rig.add(second)
    run = Batch.run

    def fail_for_second(batch: Batch, *arguments: Any) -> None:
        if batch._stream.stream == second:
            raise MemoryError
        run(batch, *arguments)

    monkeypatch.setattr(Batch, "run", fail_for_second)
    with pytest.raises(MemoryError):
        rig.run()
    assert lock_owner(folder(rig)) is None
    with duckdb.connect(str(folder(rig) / "state.duckdb")):
        pass
    assert [row["node"] for row in rig.rows("last_seen_nodes")] == ["a"]
    assert read_status(folder(rig))["streams"][first]["next_sequence"] == 2
    monkeypatch.undo()
    rig.drain()
    assert len(rig.copies(second)) == 1


def test_a_stream_that_fails_leaves_the_others_running_and_says_why_until_it_is_well(rig: Rig) -> None:
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
    shown = rig.row(f"SELECT * FROM replication WHERE stream = '{bad}'")
    assert "no_ack" in shown["last_error"]
    since = read_status(folder(rig))["streams"][bad]["last_error_since_ns"]
    rig.run()
    assert read_status(folder(rig))["streams"][bad]["last_error_since_ns"] == since
    rig.api(f"STREAM.DELETE.{bad}", server=rig.target)
    rig.drain()
    assert rig.row(f"SELECT last_error FROM replication WHERE stream = '{bad}'") == {"last_error": None}


def test_status_json_tells_the_position_the_watermark_and_the_next_deadline(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, from_sender("a", "b"))
    rig.add(stream, **SAMPLED)
    rig.drain()
    info, stored = rig.info(stream), rig.stored(stream)
    status = read_status(folder(rig))
    assert status["site"] == SITE
    shown = status["streams"][stream]
    assert (shown["created_ns"], shown["next_sequence"], shown["source_last_sequence"]) == (info.created_ns, 3, 2)
    assert shown["next_deadline_ns"] == stored[0].stored_ns + 300 * 10**9
    assert (shown["last_error"], shown["unpublished"], shown["lag_messages"]) == (None, 0, 0)
    row = rig.row("SELECT epoch_us(next_deadline) AS deadline, epoch_us(watermark) AS watermark FROM replication")
    assert row == {"deadline": shown["next_deadline_ns"] // 1000, "watermark": shown["watermark_ns"] // 1000}


def test_a_run_that_stops_before_the_end_dates_its_watermark_by_the_last_message(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = rig.make()
    rig.publish(stream, from_sender(*"abcdef"))
    rig.add(stream, batch_messages=4, **SAMPLED)
    commit, stored = NodeStage._commit, rig.stored(stream)

    def commit_once(stage: NodeStage, *arguments: Any) -> None:
        if arguments[2].first > 1:
            raise KeyboardInterrupt
        commit(stage, *arguments)

    monkeypatch.setattr(NodeStage, "_commit", commit_once)
    with pytest.raises(KeyboardInterrupt):
        rig.run()
    shown = read_status(folder(rig))["streams"][stream]
    assert (shown["watermark_ns"], shown["next_sequence"], shown["lag_messages"]) == (stored[3].stored_ns, 5, 2)
    assert rig.row("replication")["lag_seconds"] > 0


def test_the_published_file_may_be_deleted_at_any_time(rig: Rig) -> None:
    stream, other = rig.make(), rig.make()
    rig.publish(stream, from_sender("a"))
    rig.publish(other, from_sender("b"))
    rig.add(stream, **SAMPLED)
    rig.add(other, name="PARIS", **SAMPLED)
    rig.drain()
    rig.drain("PARIS")
    before = rig.rows("SELECT name, node FROM last_seen_nodes ORDER BY name")
    assert [tuple(row.values()) for row in before] == [(SITE, "a"), ("PARIS", "b")]
    assert not needs_publishing(rig.home, folder(rig))
    published = rig.home / "fleet.duckdb"
    for damaged in (None, b"not a database"):
        published.unlink()
        if damaged is not None:
            published.write_bytes(damaged)
        assert needs_publishing(rig.home, folder(rig))
        assert needs_publishing(rig.home, folder(rig, "PARIS"))
        rig.drain()
        assert not needs_publishing(rig.home, folder(rig))
        assert not needs_publishing(rig.home, folder(rig, "PARIS"))
        assert rig.rows("SELECT name, node FROM last_seen_nodes ORDER BY name") == before


def test_readers_keep_what_they_opened_and_never_block_a_run(rig: Rig) -> None:
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


def test_stages_can_be_run_by_themselves_in_any_order(rig: Rig) -> None:
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


def test_a_run_that_lingers_takes_what_comes_meanwhile_and_ends_when_nothing_does(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, from_sender("a"))
    rig.add(stream)
    rig.drain()
    reports = []
    run = threading.Thread(target=lambda: reports.append(rig.run(drain_only=False, linger="4s")))
    run.start()
    rig.publish(stream, from_sender("b"))
    wait_until(lambda: len(rig.copies(stream)) == 2, "the second copy")
    rig.publish(stream, from_sender("c"))
    run.join()
    assert len(rig.copies(stream)) == 3
    assert [report.failure for report in reports[0].values()] == [None]


def test_streams_that_are_configured_no_more_stay_in_the_tables(rig: Rig) -> None:
    stream, gone = rig.make(), rig.make()
    for source in (stream, gone):
        rig.publish(source, from_sender("a"))
        rig.add(source, **SAMPLED)
    rig.drain()
    assert len(rig.rows("node_availability")) == 2
    rig.entries.pop()
    rig.drain()
    for table in ("node_availability", "node_snapshots", "replication", "site_summary"):
        assert sorted(row["stream"] for row in rig.rows(table)) == sorted((stream, gone))


def test_what_is_published_says_by_which_run_and_when(rig: Rig) -> None:
    rig.add(rig.make())
    rig.drain()
    info = rig.row("snapshot_info")
    assert (info["run_id"], info["schema_version"]) == ("test", SCHEMA_VERSION)
    assert abs(info["as_of"].timestamp() - time.time()) < 60


def test_a_run_that_finds_more_publishes_once_it_is_caught_up(rig: Rig) -> None:
    rig.add(rig.make())
    rig.drain()
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
