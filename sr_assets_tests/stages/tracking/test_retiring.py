"""`retire`, `unretire` and `purge_after`, with and without an active run, after kills and on restored states."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sr_assets.adapters import control, crash_points
from sr_assets.adapters.crash_points import Point
from sr_assets.adapters.state.lock import SiteLock
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.settings import load_settings
from sr_assets.stages import operator_commands
from sr_assets.stages.checkpointing import restore_site
from sr_assets.stages.operator_commands import act_on_node, save_site
from sr_assets.stages.report import Stage
from sr_assets.stages.run import SiteRun
from sr_assets_tests.members import elected, key_of, make_bucket, write_key
from sr_assets_tests.rig import PATIENCE_SECONDS, SITE, Command, Rig, in_background, wait_until
from sr_assets_tests.stages.tracking.test_node_advisories import from_sender
from sr_assets_tests.stages.tracking.test_node_state import SECOND, events

HOURS = {"inspect_field": "sender", "inspect_duration": "10h"}


def tracked(rig: Rig, *names: str, **entry: Any) -> tuple[str, str]:
    """Add a stream with messages of some nodes, and drain it; return it and its advisory stream."""
    stream, advisories = rig.make(), rig.make("ADV")
    rig.publish(stream, from_sender(*names))
    rig.add(stream, advisory={"subject": f"{advisories}.%s.%v", "reliable": True}, **{**HOURS, **entry})
    rig.drain()
    return stream, advisories


def announced(rig: Rig, advisories: str, node: str) -> list[dict[str, Any]]:
    bodies = [json.loads(message.payload) for message in rig.stored(advisories)]
    return [body for body in bodies if body["value"] == node]


def act(rig: Rig, action: Any, node: str, site: str | None = None) -> list[str]:
    return [answer.line for answer in act_on_node(rig.settings(), action, node, site)]


def requests(rig: Rig) -> list[str | None]:
    """Return the answer of each request that its command has not read; None for an open one."""
    return [line for (line,) in control.query(rig.home, "SELECT line FROM requests")]


def test_retired_node_that_is_up_returns_with_its_next_message(rig: Rig) -> None:
    stream, advisories = tracked(rig, "a", "b")
    rig.travel(seconds=2)
    rig.drain()
    assert act(rig, "retire", "a") == [f"{SITE}/{stream}: retired a, which was up"]
    row = rig.row("retired_nodes")
    assert (row["node"], row["times_retired"]) == ("a", 1)
    new, expire = announced(rig, advisories, "a")
    assert (new["event"], expire["event"], expire["previous"], expire["transition"]) == ("new", "expire", "up", 2)
    advisory = rig.row("SELECT * FROM node_advisories WHERE event = 'expire'")
    assert advisory["event_time"] == advisory["detected_at"], "not at the watermark"
    assert requests(rig) == []
    rig.publish(stream, from_sender("a"))
    rig.drain()
    back = announced(rig, advisories, "a")[-1]
    assert (back["event"], back["returned"], back["previous"], back["transition"]) == ("new", True, "retired", 3)
    assert events(rig) == [("a", "new"), ("a", "expire"), ("a", "new"), ("b", "new")]


def test_unread_message_does_not_revive_a_node_that_is_retired_later(rig: Rig) -> None:
    stream, advisories = tracked(rig, "a")
    rig.publish(stream, from_sender("a", "a"))
    act(rig, "retire", "a")
    rig.drain()
    assert [body["event"] for body in announced(rig, advisories, "a")] == ["new", "expire"]
    assert rig.row("retired_nodes")["node"] == "a"


def test_centre_follows_a_node_that_was_retired_while_up(rig: Rig) -> None:
    stream, feed = rig.make(), rig.unique("ADV")
    rig.create(feed, rig.target, subjects=[f"{feed}.>", f"sr_assets.node.*.{SITE}.{SITE}.{stream}"])
    rig.publish(stream, from_sender("a", "b"))
    rig.add(stream, advisory={"subject": f"{feed}.%s.%v", "reliable": True, "cluster": "target"}, **HOURS)
    rig.add_feed(feed, name="centre")
    rig.drain()
    act(rig, "retire", "a")
    rig.drain("centre")
    statuses = rig.rows("SELECT node, status FROM global_availability ORDER BY node")
    assert [tuple(row.values()) for row in statuses] == [("a", "retired"), ("b", "up")]
    act(rig, "unretire", "a")
    rig.drain("centre")
    row = rig.row("SELECT status, last_seen FROM global_availability WHERE node = 'a'")
    assert row["status"] == "up"
    assert row["last_seen"] <= rig.row("SELECT last_seen FROM last_seen_nodes WHERE node = 'a'")["last_seen"]
    assert rig.row("SELECT up FROM global_summary")["up"] == 2
    act(rig, "retire", "a")
    rig.drain("centre")
    assert rig.row("SELECT status FROM global_availability WHERE node = 'a'")["status"] == "retired"
    told = rig.rows("SELECT event FROM global_advisories WHERE node = 'a' ORDER BY event_time, transition, event")
    assert [row["event"] for row in told] == ["new", "expire", "unretired", "expire"]
    assert rig.rows("global_rejects") == []


def test_unretire_restores_the_status_of_the_silence_without_an_advisory(rig: Rig) -> None:
    stream, advisories = tracked(rig, "a", inspect_duration="2h", warn_duration="1h")
    act(rig, "retire", "a")
    before = len(announced(rig, advisories, "a"))
    assert act(rig, "unretire", "a") == [f"{SITE}/{stream}: restored a as up"]
    assert rig.row("node_availability")["status"] == "up"
    assert len(announced(rig, advisories, "a")) == before == 2
    assert rig.row("SELECT * FROM node_advisories WHERE event = 'expire'")["undone_at"] is not None
    rig.travel(minutes=61)
    rig.drain()
    assert [event for _, event in events(rig)] == ["new", "expire", "timeout"]
    act(rig, "retire", "a")
    assert act(rig, "unretire", "a") == [f"{SITE}/{stream}: restored a as timeout"]
    rig.publish(stream, from_sender("a"))
    rig.drain()
    assert [event for _, event in events(rig)] == ["new", "expire", "timeout", "expire", "recover"]
    assert [body["transition"] for body in announced(rig, advisories, "a")] == [1, 2, 3, 4, 5]


def test_active_run_applies_a_request_between_its_batches(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, advisories = tracked(rig, "a", "b")
    ended = threading.Event()

    def run() -> None:
        with rig.open(linger="1m", run_budget="5m") as site:
            selection = {entry.stream: frozenset(Stage) for entry in site.entries}
            ready.set()
            for _ in SiteRun(site, selection, drain_only=False).rounds():
                if ended.is_set():
                    break

    settings, ready = rig.settings(), threading.Event()
    monkeypatch.setattr(operator_commands, "_run", lambda *_: pytest.fail("the active run must apply the request"))
    with in_background(run):
        try:
            assert ready.wait(PATIENCE_SECONDS)
            with rig.beating(stream, from_sender("b")[0]):
                assert [answer.done for answer in act_on_node(settings, "retire", "a", None)] == [True]
                wait_until(lambda: len(announced(rig, advisories, "a")) == 2, "the advisory")
        finally:
            ended.set()
    assert [event for node, event in events(rig) if node == "a"] == ["new", "expire"]


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the next run end after it has committed a request, before it answers; the returned function ends that."""

    def kill(point: Point) -> None:
        if point is Point.ANSWERING:
            raise KeyboardInterrupt

    monkeypatch.setattr(crash_points, "hook", kill)
    return lambda: monkeypatch.setattr(crash_points, "hook", None)


def test_killed_run_does_not_apply_a_request_again(rig: Rig, killed: Callable[[], None]) -> None:
    stream, advisories = tracked(rig, "a")
    with pytest.raises(KeyboardInterrupt):
        act(rig, "retire", "a")
    assert requests(rig) == [None]
    killed()
    # The node returns before the next run: a second retirement would be wrong.
    rig.publish(stream, from_sender("a"))
    rig.drain()
    assert [body["event"] for body in announced(rig, advisories, "a")] == ["new", "expire", "new"]
    assert rig.row("node_availability")["status"] == "up"
    assert requests(rig) == [f"{SITE}/{stream}: retired a, which was up"]
    # The command ended before it could record its action.
    row = rig.row("operator_actions")
    assert (row["action"], row["subject"], row["detail"]) == (
        "retire",
        "a",
        f"{SITE}/{stream}: retired a, which was up",
    )


def test_retired_node_survives_checkpoint_and_recovery(rig: Rig, tmp_path: Path) -> None:
    _stream, advisories = tracked(rig, "a", "b")
    act(rig, "retire", "a")
    file = tmp_path / "checkpoint"
    save_site(rig.settings(), SITE, file)
    (rig.home / "sites" / SITE / "state.duckdb").unlink()
    restore_site(rig.settings(), SITE, file)
    rig.drain()
    assert rig.row("retired_nodes")["node"] == "a"
    assert len(announced(rig, advisories, "a")) == 2


def test_recovered_state_keeps_a_node_retired(rig: Rig, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, advisories = tracked(rig, "a", "b")
    act(rig, "retire", "a")
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(rig.home / "replication.yaml"))
    assert command("recover", "--stream", stream, "--force")[0] == 0
    assert rig.row("retired_nodes")["node"] == "a"
    act(rig, "unretire", "a")
    assert command("recover", "--stream", stream, "--force")[0] == 0
    assert rig.rows("retired_nodes") == []
    act(rig, "retire", "a")
    (rig.home / "sites" / SITE / "state.duckdb").unlink()
    assert command("recover", "--stream", stream)[0] == 0
    rig.drain()
    assert rig.row("retired_nodes")["node"] == "a"
    assert len(announced(rig, advisories, "a")) == 3


def test_refused_actions_name_the_remedy(rig: Rig) -> None:
    stream, advisories = tracked(rig, "web1", inspect_duration="2h", warn_duration="1h")
    label = f"{SITE}/{stream}"
    with pytest.raises(RunError, match="node 'web2' is unknown; did you mean 'web1'"):
        act(rig, "retire", "web2")
    with pytest.raises(ConfigurationError, match="--site PARIS: is not configured"):
        act(rig, "retire", "web1", "PARIS")
    assert act(rig, "unretire", "web1")[0].startswith(f"{label}: node 'web1' is not retired but ")
    rig.travel(hours=3)
    rig.drain()
    assert f"{label}: node 'web1' is already retired since " in act(rig, "retire", "web1")[0]
    assert "longer than inspect_duration (2h); its next message brings it back" in act(rig, "unretire", "web1")[0]
    assert [body["event"] for body in announced(rig, advisories, "web1")] == ["new", "timeout", "expire"]


def test_node_of_several_sites_needs_a_site(rig: Rig) -> None:
    stream, _ = tracked(rig, "a")
    rig.add(stream, name="PARIS", target_stream=rig.unique("P"), target_subject_prefix=rig.unique("p"), **HOURS)
    rig.drain("PARIS")
    with pytest.raises(ConfigurationError, match=f"choose one with --site: {SITE}, PARIS"):
        act(rig, "retire", "a")
    act(rig, "retire", "a", "PARIS")
    assert rig.row("retired_nodes")["name"] == "PARIS"


def test_follower_names_the_leader_and_changes_nothing(rig: Rig) -> None:
    stream, advisories = tracked(rig, "a")
    bucket = make_bucket(rig)
    # A Stream Replicator holds the stream's key.
    assert write_key(rig, bucket, key_of(stream), "other")
    (answer,) = act_on_node(rig.settings(**elected("here", bucket)), "retire", "a", None)
    assert not answer.done
    assert "other leads since " in answer.line
    assert answer.line.endswith("; run this command there")
    assert requests(rig) == []
    assert len(announced(rig, advisories, "a")) == 1


def test_request_that_no_run_takes_is_withdrawn(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    tracked(rig, "a")
    monkeypatch.setattr(operator_commands, "_WAIT_SECONDS", 0.5)
    with SiteLock(rig.home / "sites" / SITE, "a run that is catching up", 0.0):
        (answer,) = act_on_node(rig.settings(), "retire", "a", None)
    assert not answer.done
    assert "no run reached the end of its sources within 0.5 s, so nothing was changed; try again" in answer.line
    assert requests(rig) == []
    rig.drain()
    assert rig.rows("retired_nodes") == []


def test_unreachable_source_leaves_no_request(rig: Rig) -> None:
    tracked(rig, "a")
    rig.entries[0]["source_url"] = "nats://127.0.0.1:2"
    (answer,) = act_on_node(rig.settings(), "retire", "a", None)
    assert not answer.done
    assert "127.0.0.1:2" in answer.line
    assert requests(rig) == []


def test_commands_are_recorded_with_reason_and_user(
    rig: Rig, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, _ = tracked(rig, "a")
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(rig.home / "replication.yaml"))
    assert command("retire", "a", "--reason", "sold") == (0, f"{SITE}/{stream}: retired a, which was up\n", "")
    assert command("unretire", "a") == (0, f"{SITE}/{stream}: restored a as up\n", "")
    code, _, errors = command("unretire", "a")
    assert (code, errors.count("\n")) == (1, 1)
    rows = rig.rows('SELECT action, subject, detail FROM operator_actions ORDER BY "at" DESC LIMIT 2')
    assert [tuple(row.values()) for row in rows] == [
        ("unretire", "a", f"{SITE}/{stream}: restored a as up"),
        ("retire", "a", f"{SITE}/{stream}: retired a, which was up; sold"),
    ]


@pytest.mark.parametrize("keys", (pytest.param({}, marks=pytest.mark.nightly), {"retired_retention": "1h"}))
def test_purged_node_leaves_no_rows_and_continues_its_counter(rig: Rig, keys: dict[str, str]) -> None:
    stream, _ = tracked(rig, "a", "b", purge_after="2h", **keys)
    act(rig, "retire", "a")
    assert len(rig.rows("SELECT * FROM node_advisories WHERE node = 'a'")) == 2
    rig.travel(hours=3)
    rig.drain()
    rig.drain()
    for table in ("node_availability", "node_advisories", "node_snapshots"):
        assert [row["node"] for row in rig.rows(f"SELECT DISTINCT node FROM {table}")] == ["b"], table
    rig.publish(stream, from_sender("a"))
    rig.drain()
    row = rig.row("SELECT * FROM node_advisories WHERE node = 'a'")
    assert (row["event"], row["returned"], row["transition"]) == ("new", False, 3)


def test_purge_after_of_the_top_level_is_the_default(tmp_path: Path) -> None:
    file = tmp_path / "replication.yaml"
    entry = {"source_url": "a", "target_url": "b", **HOURS}
    streams = [{"stream": "A", **entry}, {"stream": "B", **entry, "purge_after": "1h"}]
    file.write_text(json.dumps({"name": "x", "purge_after": "30d", "streams": streams}))
    assert [stream.purge_after_ns for stream in load_settings(file, {}).streams] == [30 * 86400 * SECOND, 3600 * SECOND]
    file.write_text(json.dumps({"name": "x", "streams": [{**streams[1], "purge_after": "soon"}]}))
    with pytest.raises(ConfigurationError, match="purge_after: 'soon' is not a duration"):
        load_settings(file, {})
