"""Recovery of one stream: a forced rebuild, pending copies, and recreated or rolled-back sources."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest

from sr_assets.adapters.state.store import SiteState
from sr_assets.automation.observing import find_work
from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import MESSAGE_ID_HEADER, header_values
from sr_assets.stages.replication.batch import CopyBatch
from sr_assets.stages.replication.recover import recover_stream
from sr_assets.stages.report import Stage
from sr_assets_tests.forks import run_forked
from sr_assets_tests.rig import SITE, Rig, Sent
from sr_assets_tests.servers import NatsServer

SAMPLED = {"inspect_field": "sender", "inspect_duration": "10h"}
TABLES = ("streams", "copying", "nodes", "transitions", "copies", "snapshots", "gaps", "copy_queue")


def numbered(count: int, first: int = 1, sender: str = "n") -> list[Sent]:
    return [Sent(json.dumps({"sender": f"{sender}{n}", "n": n}).encode()) for n in range(first, first + count)]


def numbers(rig: Rig, stream: str) -> list[int]:
    return [json.loads(copy.payload)["n"] for copy in rig.copies(stream)]


def state_rows(rig: Rig, stream: str) -> dict[str, list[Any]]:
    """Return all rows of a stream in the site's state."""
    with SiteState(rig.home / "sites" / SITE) as state:
        return {
            table: state.connection.execute(f"SELECT * FROM {table} WHERE stream = ? ORDER BY ALL", [stream]).fetchall()
            for table in TABLES
        }


def unpublished_ids(rig: Rig, stream: str) -> list[str]:
    """Return the ids of a stream's unpublished advisories in publication order."""
    with SiteState(rig.home / "sites" / SITE) as state:
        return [row["event_id"] for row in state.outbox(stream).unpublished(1_000)]


def epoch(rig: Rig, stream: str) -> int:
    with SiteState(rig.home / "sites" / SITE) as state:
        loaded = state.load_stream(stream)
    assert loaded is not None
    return loaded.epoch_ns


def recover(rig: Rig, stream: str, *, force: bool = True) -> str:
    settings = rig.settings()
    (chosen,) = (entry for entry in settings.streams if entry.stream == stream)
    return recover_stream(settings, chosen, force=force)


def test_forced_recovery_rebuilds_one_stream_and_leaves_the_other(
    rig: Rig,
) -> None:
    first, second, advisories = rig.make(), rig.make(), rig.unique("ADV")
    for stream in (first, second):
        # No stream stores the advisories yet, so they stay in the outbox.
        rig.add(stream, advisory={"subject": f"{advisories}.%s.%v", "reliable": True}, **SAMPLED)
        rig.publish(stream, numbered(3))
    rig.drain()
    # A message after the last copy that sampling skips: it is read again after the recovery.
    rig.publish(first, numbered(1))
    rig.drain()
    before, unpublished, old_epoch = state_rows(rig, second), unpublished_ids(rig, first), epoch(rig, first)
    assert len(unpublished) == 3
    with pytest.raises(RunError, match=r"has a readable state in .* use --force"):
        recover(rig, first, force=False)
    file = rig.home / "replication.yaml"
    arguments = [sys.executable, "-m", "sr_assets", "--config", str(file), "recover", "--stream", first, "--force"]
    environ = {key: value for key, value in os.environ.items() if key != "SR_ASSETS_HOME"}
    output = run_forked(arguments, env=environ).stdout
    assert output.startswith(f"{SITE}/{first}: continues at 4; 3 copies found in {first}, the last one of 3\n")
    assert state_rows(rig, second) == before
    assert unpublished_ids(rig, first) == unpublished
    assert epoch(rig, first) > old_epoch
    rig.publish(first, numbered(1, first=4))
    rig.create(advisories)
    rig.drain()
    assert numbers(rig, first) == [1, 2, 3, 4]
    published = [json.loads(message.payload) for message in rig.stored(advisories)]
    ids = [advisory["event_id"] for advisory in published if advisory["stream"] == first]
    assert ids[:3] == unpublished
    assert len(ids) == len(set(ids)) == 4
    assert len(rig.rows(f"SELECT * FROM node_advisories WHERE stream = '{first}'")) == 4


@pytest.mark.parametrize(
    "deleted",
    ((2, 4, 5), (1, 2, 3, 4, 5), *(pytest.param(each, marks=pytest.mark.nightly) for each in ((), (2,), (1, 3)))),
    ids=str,
)
def test_recovery_finds_the_copy_of_a_deleted_message(rig: Rig, deleted: tuple[int, ...]) -> None:
    """A source with a limit per subject loses messages between others; no node's next message is copied too early."""
    stream = rig.make()
    rig.add(stream, **SAMPLED)
    rig.publish(stream, numbered(5))
    rig.drain()
    rig.publish(stream, numbered(5))
    rig.drain()
    for sequence in deleted:
        rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})
    (rig.home / "sites" / SITE / "state.duckdb").unlink()
    recover(rig, stream, force=False)
    rig.publish(stream, numbered(5))
    rig.drain()
    assert numbers(rig, stream) == [1, 2, 3, 4, 5]


def test_recovery_keeps_uncopied_messages_queued(rig: Rig) -> None:
    """With several writers a later copy may exist without an earlier one."""
    stream = rig.make()
    rig.add(stream, workers=2, order="none", **SAMPLED)
    rig.publish(stream, numbered(4))
    rig.drain()
    lost = next(copy for copy in rig.copies(stream) if json.loads(copy.payload)["n"] == 2)
    rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": lost.sequence}, rig.target)
    with SiteState(rig.home / "sites" / SITE) as state:
        state.connection.execute(
            "INSERT INTO copy_queue SELECT stream, starts, created_ns, number, 'n' || number, 9"
            " FROM streams, (VALUES (2), (3)) AS queued(number)"
        )
    recover(rig, stream)
    assert [row[3] for row in state_rows(rig, stream)["copy_queue"]] == [2]
    rig.drain()
    assert sorted(numbers(rig, stream)) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "tracked", (pytest.param(True, id="tracked"), pytest.param(False, id="plain", marks=pytest.mark.nightly))
)
def test_forced_recovery_resumes_on_a_recreated_source(rig: Rig, tracked: bool) -> None:
    stream = rig.make()
    rig.add(stream, **(SAMPLED if tracked else {}))
    rig.publish(stream, numbered(3))
    rig.drain()
    rig.api(f"STREAM.DELETE.{stream}")
    rig.create(stream)
    rig.publish(stream, numbered(3, first=11))
    assert "was recreated" in rig.failure()
    old_epoch = epoch(rig, stream)
    shutil.move(rig.home / "sites", rig.home / "sites.aside")
    with pytest.raises(RunError, match=r"was recreated since it was copied.*--force"):
        recover(rig, stream, force=False)
    shutil.rmtree(rig.home / "sites")
    shutil.move(rig.home / "sites.aside", rig.home / "sites")
    assert "continues at 1;" in recover(rig, stream)
    assert epoch(rig, stream) > old_epoch
    rig.drain()
    rig.drain()
    assert numbers(rig, stream) == [1, 2, 3, 11, 12, 13]
    assert len({copy.headers for copy in rig.copies(stream)}) == 6
    if tracked:
        nodes = {row["node"] for row in rig.rows("last_seen_nodes")}
        assert nodes == {f"n{n}" for n in (1, 2, 3, 11, 12, 13)}


def assert_counters_add_up(rig: Rig) -> None:
    row = rig.row("replication")
    parts = ("copied_messages", "skipped_messages", "too_old_messages", "parked_messages", "queued_messages")
    assert row["seen_messages"] == sum(row[part] for part in parts), row


def test_recovery_records_the_queue_of_a_recreated_source_as_lost(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, **SAMPLED)
    rig.publish(stream, numbered(5))
    rig.drain()
    rig.publish(stream, numbered(4, first=6))
    rig.drain(stages=(Stage.NODE_STATE,))
    rig.api(f"STREAM.DELETE.{stream}")
    rig.create(stream)
    rig.publish(stream, numbered(3, first=21))
    assert "4 queued copies are lost" in recover(rig, stream)
    gap = rig.row("SELECT first_sequence, last_sequence, messages, reason FROM gaps")
    assert tuple(gap.values()) == (6, 9, 4, "lost")
    assert_counters_add_up(rig)
    rig.drain()
    assert numbers(rig, stream) == [1, 2, 3, 4, 5, 21, 22, 23]
    assert_counters_add_up(rig)


def crash_before_noting_copies(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run until a batch has made its copies, then crash before it records them."""

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(CopyBatch, "_note_copies", crash)
        with pytest.raises(KeyboardInterrupt):
            rig.run()


def test_recovery_adds_the_copies_of_an_open_batch_to_the_history(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = rig.make()
    rig.add(stream, batch_messages=10, **SAMPLED)
    rig.publish(stream, numbered(25))
    crash_before_noting_copies(rig, monkeypatch)
    # An interrupted window leaves a hole.
    rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": 4}, rig.target)
    assert "1 copies that were queued or under way are made" in recover(rig, stream)
    rig.drain()
    assert sorted(numbers(rig, stream)) == list(range(1, 26))
    assert [row["sequence"] for row in rig.rows("SELECT sequence FROM node_snapshots ORDER BY 1")] == [*range(1, 26)]


def test_recovery_finishes_an_open_batch_of_an_untracked_stream(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = rig.make()
    rig.add(stream, batch_messages=10, filter_subject=f"{stream}.m")
    bodies = [Sent(b'{"n": %d}' % n, "other" if n == 6 else "m") for n in range(1, 26)]
    rig.publish(stream, bodies)

    crash_before_noting_copies(rig, monkeypatch)
    assert numbers(rig, stream) == [1, 2, 3, 4, 5, 7, 8, 9, 10]
    # An interrupted window leaves holes before later copies.
    for sequence in (2, 4):
        rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence}, rig.target)
    rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": 4})
    assert "1 copies that were queued or under way are made" in recover(rig, stream)
    rig.drain()
    assert sorted(numbers(rig, stream)) == [n for n in range(1, 26) if n not in (4, 6)]
    assert_counters_add_up(rig)
    assert rig.row("SELECT sum(messages) AS n FROM gaps WHERE first_sequence < 11")["n"] == 2


def test_recovery_keeps_the_history_of_an_earlier_source_separate(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, on_source_reset="recopy", inspect_force_field="force", **SAMPLED)

    def report(*nodes: str) -> None:
        rig.publish(stream, [Sent(json.dumps({"sender": node, "force": True}).encode()) for node in nodes])

    report("a", "b", "c", "d")
    rig.drain()
    rig.api(f"STREAM.DELETE.{stream}")
    rig.create(stream)
    # The last nodes of the earlier source, at lower sequences.
    report("d", "c")
    rig.drain()
    shutil.rmtree(rig.home / "sites")
    assert "2 snapshot files kept" in recover(rig, stream, force=False)
    report("b")
    for _ in range(2):
        rig.drain()
        latest = {row["node"]: row["sequence"] for row in rig.rows("node_snapshots")}
        assert latest == {"a": 1, "b": 3, "c": 2, "d": 1}
    files = [str(file) for file in (rig.home / "snapshots").rglob("*.parquet")]
    assert duckdb.execute(f"SELECT count(*) FROM read_parquet({files})").fetchall() == [(7,)]


def test_recovery_resumes_after_the_last_message_before_a_rollback(
    rig: Rig, restore_source: Callable[[str], None]
) -> None:
    stream = rig.make()
    rig.add(stream, **SAMPLED)
    rig.publish(stream, numbered(3))
    restore_source("save")
    rig.publish(stream, numbered(3, first=4))
    rig.drain()
    restore_source("restore")
    # The source has grown past the position: sequences 4 to 8 now hold other messages.
    rig.publish(stream, numbered(5, first=14))
    # Nothing tells that the copy of 5 is of another message than this one was.
    rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": 5})
    assert "holds another message 6" in rig.failure()
    summary = recover(rig, stream)
    assert "continues at 4;" in summary
    assert f"source stream {stream} lacks the copied message 6 (stored " in summary
    rig.drain()
    rig.drain()
    assert numbers(rig, stream) == [1, 2, 3, 4, 5, 6, 14, 16, 17, 18]
    nodes = {row["node"] for row in rig.rows("last_seen_nodes")}
    # Messages that the source lost still count as seen.
    assert nodes == {f"n{n}" for n in (1, 2, 3, 4, 5, 6, 14, 16, 17, 18)}


def test_recovery_from_copies_alone_notices_a_later_rollback(rig: Rig, restore_source: Callable[[str], None]) -> None:
    stream = rig.make()
    rig.add(stream)
    rig.create(stream)
    restore_source("save")
    rig.publish(stream, numbered(3))
    rig.drain()
    rig.api(f"STREAM.PURGE.{stream}")
    shutil.rmtree(rig.home / "sites")
    recover(rig, stream)
    restore_source("restore")
    rig.publish(stream, numbered(5, first=11))
    assert "holds another message 3 than the one read" in rig.failure()


@pytest.mark.parametrize("values", ({}, SAMPLED), ids=("plain", "sampled"))
def test_rollback_after_a_lost_state_gives_copies_other_ids_again(
    rig: Rig, restore_source: Callable[[str], None], values: dict[str, Any]
) -> None:
    stream = rig.make()
    rig.add(stream, on_source_reset="recopy", **values)
    rig.publish(stream, numbered(3))
    restore_source("save")
    rig.publish(stream, numbered(3, first=4))
    rig.drain()
    for first, count in ((14, 1), (24, 5)):
        restore_source("restore")
        rig.publish(stream, numbered(count, first=first))
        rig.drain()
        shutil.rmtree(rig.home / "sites")
        shutil.rmtree(rig.home / "snapshots", ignore_errors=True)
        # The run has followed the rollback, although the target holds copies from before it at later sequences.
        assert f"continues at {4 + count};" in recover(rig, stream, force=False)
    rig.publish(stream, numbered(1, first=30))
    rig.drain()
    assert set(numbers(rig, stream)) == {*range(1, 7), 14, *range(24, 29), 30}
    ids = [header_values(copy.headers, MESSAGE_ID_HEADER)[-1] for copy in rig.copies(stream)]
    assert len(set(ids)) == len(ids)


def test_untracked_stream_copies_its_queue_and_drops_its_nodes(rig: Rig, tmp_path: Path) -> None:
    stream = rig.make()
    with NatsServer(tmp_path / "target", "mortal") as target:
        rig.target = target
        entry = rig.add(stream, **SAMPLED)
        rig.publish(stream, numbered(2))
        rig.drain()
        target.stop()
        rig.publish(stream, [*numbered(2, first=3), *numbered(2, first=1)])
        assert rig.failure()
        # The two new senders are due; sampling skips the two known ones.
        assert len(state_rows(rig, stream)["copy_queue"]) == 2
        for key in SAMPLED:
            del entry[key]
        rig.publish(stream, numbered(2, first=7))
        assert rig.failure()
        assert rig.rows("last_seen_nodes") == []
        target.start()
        rig.drain()
        assert numbers(rig, stream) == [1, 2, 3, 4, 7, 8]
        assert rig.rows("last_seen_nodes") == rig.rows("retired_nodes") == []
        row = rig.row("replication")
        assert (row["queued_messages"], row["lag_messages"], row["copied_messages"]) == (0, 0, 6)
        assert row["seen_messages"] == row["copied_messages"] + row["skipped_messages"]
        assert find_work(rig.settings(), SITE) == (None, "caught up")
        # Tracked again: nodes are new, but transition numbers continue.
        entry |= SAMPLED
        rig.publish(stream, numbered(1))
        rig.drain()
        assert [row["node"] for row in rig.rows("last_seen_nodes")] == ["n1"]
        assert [row["transition"] for row in rig.rows("node_advisories") if row["node"] == "n1"] == [1, 2]


def test_watermark_far_ahead_deletes_no_history_or_retired_nodes(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, retired_retention="20d", **SAMPLED)
    rig.publish(stream, numbered(2))
    rig.drain()
    with SiteState(rig.home / "sites" / SITE) as state:
        state.connection.execute("UPDATE streams SET watermark_ns = watermark_ns + ?", [40 * 86_400 * 10**9])
    rig.drain(snapshots={"retention": "10d"})
    rig.drain(snapshots={"retention": "10d"})
    assert {row["node"] for row in rig.rows("retired_nodes")} == {"n1", "n2"}
    assert len(list((rig.home / "snapshots").rglob("*.parquet"))) == 1
    assert len(rig.rows("node_snapshots")) == 2


def told(rig: Rig, advisories: str) -> list[tuple[str, str]]:
    """Return the stored advisories in order: the node, and its event."""
    bodies = [json.loads(message.payload) for message in rig.stored(advisories)]
    return [(body["value"], body["event"]) for body in bodies]


def report_every_ten_minutes(rig: Rig, stream: str) -> str:
    """Let three nodes report for 50 minutes, a fourth one at the end; return the stream of the advisories.

    The interval of an hour lets the target hold one copy of each node.
    """
    advisories = rig.unique("ADV")
    advisory = {"subject": f"{advisories}.%s.%v", "reliable": True}
    rig.add(stream, inspect_field="sender", inspect_duration="1h", advisory=advisory)
    rig.create(advisories)
    rig.publish(stream, numbered(3))
    rig.drain()
    for _ in range(5):
        rig.travel(minutes=10)
        rig.publish(stream, numbered(3))
        rig.drain()
    rig.publish(stream, numbered(1, first=4))
    rig.drain()
    assert numbers(rig, stream) == [1, 2, 3, 4]
    return advisories


@pytest.mark.parametrize("lost", ("source and state", "source", "messages and state"))
def test_recovery_counts_time_without_messages_as_blind(rig: Rig, lost: str) -> None:
    """Only copies, an hour apart, tell that the nodes were up: their silence begins with the messages of the present source."""
    stream = rig.make()
    advisories = report_every_ten_minutes(rig, stream)
    if "state" in lost:
        shutil.rmtree(rig.home / "sites")
    rig.travel(hours=5)
    rig.publish(stream, numbered(4))
    if "source" in lost:
        rig.api(f"STREAM.DELETE.{stream}")
        rig.create(stream)
    else:
        rig.api(f"STREAM.PURGE.{stream}")
    assert "that were not copied; silence excludes this time" in recover(rig, stream)
    rig.publish(stream, numbered(4))
    rig.drain()
    rig.travel(minutes=29)
    rig.drain()
    news = [(f"n{n}", "new") for n in (1, 2, 3, 4)]
    assert told(rig, advisories) == news
    rig.travel(minutes=2)
    rig.drain()
    assert told(rig, advisories) == [*news, *((node, "timeout") for node, _ in news)]


def test_recovery_announces_no_silence_again_without_its_blind_time(rig: Rig) -> None:
    """A silence included blind time; after the state is lost, only the announcement still includes it."""
    stream = rig.make()
    advisories = report_every_ten_minutes(rig, stream)
    rig.travel(minutes=20)
    rig.publish(stream, numbered(1, sender="lost"))
    rig.travel(minutes=1)
    rig.api(f"STREAM.PURGE.{stream}")
    rig.publish(stream, numbered(1, first=5))
    rig.drain()
    assert len(rig.rows("blind_spans")) == 1
    rig.travel(minutes=35)
    rig.drain()
    before = told(rig, advisories)
    assert [event for _, event in before] == [*["new"] * 5, *["timeout"] * 5]
    shutil.rmtree(rig.home / "sites")
    recover(rig, stream, force=False)
    rig.drain()
    assert told(rig, advisories) == before
    rig.publish(stream, numbered(5))
    rig.drain()
    assert told(rig, advisories) == [*before, *((f"n{n}", "recover") for n in range(1, 6))]


def test_recovery_announces_no_ended_silence_again_without_its_blind_time(
    rig: Rig, restore_source: Callable[[str], None]
) -> None:
    """A rollback made blind time; the messages that ended the silence were not copied, so that the next run reads them again."""
    stream, advisories = rig.make(), rig.unique("ADV")
    advisory = {"subject": f"{advisories}.%s.%v", "reliable": True}
    rig.add(stream, inspect_field="sender", inspect_duration="1h", advisory=advisory, on_source_reset="recopy")
    rig.create(advisories)
    rig.publish(stream, numbered(3))
    rig.drain()
    restore_source("save")
    rig.travel(minutes=20)
    rig.publish(stream, numbered(1, sender="lost"))
    rig.drain()
    restore_source("restore")
    rig.publish(stream, numbered(1, first=4))
    rig.drain()
    assert len(rig.rows("blind_spans")) == 1
    rig.travel(minutes=35)
    rig.publish(stream, numbered(3))
    rig.drain()
    before = told(rig, advisories)
    assert sorted(before[-3:]) == [(f"n{n}", "recover") for n in (1, 2, 3)]
    shutil.rmtree(rig.home / "sites")
    recover(rig, stream, force=False)
    rig.drain()
    assert told(rig, advisories) == before
