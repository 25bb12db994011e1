"""Advisory feeds: real runs fold advisories of all formats into one view; a second fold checks it."""

import json
import random
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from dagster import AssetCheckResult

from sr_assets.adapters.state.store import SiteState
from sr_assets.assets.checks import check_feed
from sr_assets.automation.observing import find_work
from sr_assets.domain.advisories import observer_alive
from sr_assets.settings import StreamSettings
from sr_assets.stages.report import StreamReport
from sr_assets.stages.tracking.node_advisories import HeartbeatStage, heartbeat_grace_ns
from sr_assets_tests.event_schema import unknown_or_wrong
from sr_assets_tests.rig import SITE, Rig, Sent

BASE = 1_700_000_000
HOUR = 3_600 * 10**9
STATUS = {"new": "up", "recover": "up", "timeout": "timeout", "expire": "retired"}
PREVIOUS = {"new": None, "timeout": "up", "recover": "timeout", "expire": "timeout"}
V2 = "io.choria.sr.v2.age_advisory"
V1 = "https://choria.io/schemas/sr/v1/age_advisory.json"


def own_advisory(
    node: str, event: str, transition: int, at: float, *, name: str = "london", replicator: str = "EAST", **more: Any
) -> dict[str, Any]:
    """Return an advisory in this package's format; `at` is in seconds after `BASE`."""
    event_time = datetime.fromtimestamp(BASE, UTC) + timedelta(seconds=at)
    return {
        "protocol": V2,
        "event_id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{replicator}{name}{node}{transition}")),
        "inspect_field": "sender",
        "age": 60,
        "seen": int(BASE + at - 60),
        "replicator": replicator,
        "timestamp": int(BASE + at),
        "event": event,
        "value": node,
        "stream": "NODES",
        "name": name,
        "event_time": event_time.isoformat().replace("+00:00", "Z"),
        "sequence": 7,
        "transition": transition,
        "previous": ("retired" if transition > 1 else None) if event == "new" else PREVIOUS[event],
        "late": False,
        "returned": event == "new" and transition > 1,
        "age_seconds": 60.0,
        "outage_seconds": None,
    } | more


def v2_advisory(node: str, event: str, at: int, *, replicator: str = "GO", **more: Any) -> dict[str, Any]:
    """Return an advisory of the Stream Replicator."""
    advisory = {"protocol": V2, "event_id": f"{node}{event}{at}", "inspect_field": "sender", "age": 60}
    times = {"seen": BASE + at - 60, "timestamp": BASE + at}
    return advisory | times | {"replicator": replicator, "event": event, "value": node} | more


def v1_advisory(node: str, event: str, at: int) -> dict[str, Any]:
    """Return an advisory in the older v1 format."""
    advisory = {"$schema": V1, "inspect": "sender", "value": node, "age": 60, "seen": BASE + at - 60}
    return advisory | {"replicator": "OLD", "timestamp": BASE + at, "event": event}


def node_histories(chance: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the advisories of some nodes in chronological order, from sites of every format."""
    for number in range(60):
        node, at = f"n{number}.example.net", chance.randrange(1000)
        story = ["new", *chance.choice(([], ["timeout"], ["timeout", "recover"], ["timeout", "expire", "new"]))]
        for transition, event in enumerate(story, 1):
            at += chance.randrange(1, 300)
            match number % 4:
                case 0:
                    yield v2_advisory(node, event, at)
                case 1:
                    yield v1_advisory(node, event, at)
                case site:
                    yield own_advisory(node, event, transition, at + 0.25, name="paris" if site == 2 else "london")


def expected(history: list[dict[str, Any]]) -> set[tuple[Any, ...]]:
    """Fold a history: the highest transition wins, then the latest time, then the later event in a node's life."""
    cycle = ["new", "timeout", "recover", "expire"]

    def rank(advisory: dict[str, Any]) -> tuple[int, int, int]:
        return advisory.get("transition", 0), advisory["timestamp"], cycle.index(advisory["event"])

    best, rows = {}, set()
    for advisory in sorted(history, key=rank):
        best[advisory["replicator"], advisory.get("name"), advisory.get("stream"), advisory["value"]] = advisory
    for key, advisory in best.items():
        at = BASE + (advisory["timestamp"] - BASE) + (0.25 if "transition" in advisory else 0)
        seen = at if STATUS[advisory["event"]] == "up" else advisory["seen"]
        origin = "ours" if "transition" in advisory else "v2" if "protocol" in advisory else "v1"
        event_time = datetime.fromtimestamp(at, UTC)
        rows.add((*key, STATUS[advisory["event"]], event_time, datetime.fromtimestamp(seen, UTC), event_time, origin))
    return rows


def global_rows(rig: Rig) -> set[tuple[Any, ...]]:
    columns = "replicator, name, stream, node, status, status_since, last_seen, event_time, source"
    return {tuple(row.values()) for row in rig.rows(f"SELECT {columns} FROM global_availability")}


def publish(rig: Rig, stream: str, advisories: list[Any]) -> None:
    bodies = [advisory if isinstance(advisory, bytes) else json.dumps(advisory).encode() for advisory in advisories]
    rig.publish(stream, [Sent(body) for body in bodies], rig.target)


@pytest.fixture
def feed(rig: Rig) -> str:
    """A stream at the centre, read by the site's only feed."""
    stream = rig.make("FEED", rig.target)
    # These events are years old.
    rig.add_feed(stream, batch_messages=70, retired_retention="50Y")
    return stream


def test_shuffled_and_repeated_advisories_fold_to_the_same_view(rig: Rig, feed: str) -> None:
    chance = random.Random(7)
    history = list(node_histories(chance))
    messages = [*history, *chance.sample(history, 40)]
    chance.shuffle(messages)
    for first in range(0, len(messages), 90):
        publish(rig, feed, messages[first : first + 90])
        rig.drain()
    assert global_rows(rig) == expected(history)
    # The history has each advisory once, with the time of its first receipt.
    counts = rig.row("SELECT count(*) AS all, count(DISTINCT event_id) AS ids FROM global_advisories")
    assert counts == {"all": len(history), "ids": len(history)}
    first_at = {message.payload: message.stored_ns // 1000 for message in reversed(rig.copies(feed))}
    received = rig.rows("SELECT event_id, epoch_us(received_at) AS at FROM global_advisories WHERE source = 'v2'")
    ids = {
        advisory["event_id"]: first_at[json.dumps(advisory).encode()] for advisory in history if "protocol" in advisory
    }
    assert all(ids[row["event_id"]] == row["at"] for row in received)
    row = rig.row("replication")
    assert (row["seen_messages"], row["copied_messages"], row["lag_messages"]) == (len(messages), len(messages), 0)
    assert (row["target_stream"], row["next_sequence"]) == (None, len(messages) + 1)


def test_invalid_advisories_are_rejected_and_counted(rig: Rig, feed: str) -> None:
    good = own_advisory("good", "new", 1, 0)
    ahead = (datetime.now(UTC) + timedelta(hours=5)).isoformat()
    bad = {
        "not_json": b'{"protocol": "io.cho\0',
        "no_advisory": {"hello": "world"},
        "unknown_event": good | {"event": "exploded"},
        "impossible_transition": own_advisory("recovers", "recover", 1, 0),
        "too_long": good | {"value": "x" * 10_000},
        "too_large": b"[" * 200_000,
        "bad_time": v2_advisory("web", "new", 1 << 62),
        "bad_field": good | {"value": "\ud800"},
        # A single clock that is hours ahead decides nothing: the node is accepted.
        "clock_ahead": own_advisory("early", "new", 1, 0, event_time=ahead),
    }
    publish(rig, feed, [*bad.values(), b"[" * 20_000, good])
    (report,) = rig.drain().values()
    assert {row["node"] for row in rig.rows("global_availability")} == {"good", "early"}
    rejects = rig.rows("SELECT sequence, reason, feed, subject, payload_bytes, excerpt FROM global_rejects ORDER BY 1")
    assert [row["reason"] for row in rejects] == [*bad, "not_json"]
    assert rejects[0]["excerpt"] == '{"protocol": "io.cho\0'
    assert rejects[4]["payload_bytes"] > 10_000
    assert len(rejects[4]["excerpt"]) == 200
    assert {row["subject"] for row in rejects} == {f"{feed}.m"}
    row = rig.row("replication")
    assert (row["seen_messages"], row["copied_messages"], row["parked_messages"]) == (11, 2, 9)
    assert report.parked == 10
    with rig.open() as site:
        results = {result.check_name: result for result in check_feed(site, report)}
    assert results["no_gap"].passed
    assert not results["advisories_understood"].passed
    assert results["advisories_understood"].metadata["last_day"].value == 10


def test_feeds_keep_the_newest_rejects_and_count_all(rig: Rig, feed: str) -> None:
    rig.feeds[0].pop("batch_messages")
    other = rig.make("OTHER", rig.target)
    rig.add_feed(other)
    publish(rig, feed, [b"x"] * 5_100)
    publish(rig, other, [b"y"] * 100)
    rig.drain()
    rejects = rig.row("SELECT count(*) AS kept, max(sequence) AS last FROM global_rejects WHERE excerpt = 'x'")
    assert rejects == {"kept": 5_000, "last": 5_100}, "each feed keeps its newest 5,000"
    counts = {row["stream"]: row["parked_messages"] for row in rig.rows("replication")}
    assert counts == {feed: 5_100, other: 100}


def test_node_at_two_sites_is_listed_until_it_leaves_one(rig: Rig, feed: str) -> None:
    moves, arrives = own_advisory("moves", "new", 1, 0), own_advisory("moves", "new", 1, 1, name="paris")
    publish(rig, feed, [moves, arrives, own_advisory("stays", "new", 1, 0)])
    rig.drain()
    assert len(rig.rows("SELECT * FROM global_availability WHERE node = 'moves'")) == 2
    several = rig.row("v_nodes_at_several_sites")
    assert (several["node"], several["sites"], several["names"]) == ("moves", 2, ["london", "paris"])
    summary = rig.rows("SELECT * FROM global_summary ORDER BY name")
    counts = [(row["nodes"], row["up"], row["timeout"], row["retired"]) for row in summary]
    assert counts == [(2, 2, 0, 0), (1, 1, 0, 0)]
    publish(rig, feed, [own_advisory("moves", "timeout", 2, 100), own_advisory("moves", "expire", 3, 200)])
    rig.drain()
    assert rig.rows("v_nodes_at_several_sites") == []
    london = rig.row("SELECT * FROM global_summary WHERE name = 'london'")
    assert (london["nodes"], london["up"], london["retired"]) == (1, 1, 1)
    assert (london["replicator"], london["stream"], london["blind"]) == ("EAST", "NODES", False)


def test_overdue_heartbeat_marks_the_site_blind_and_requests_a_run(rig: Rig, feed: str) -> None:
    watched: dict[str, Any] = {"replicator": "EAST", "stream": "NODES", "ts_ns": 0, "watermark_ns": 5}
    watched |= {"lag_messages": 3, "lag_ns": 0}
    heartbeats = [
        observer_alive(**watched, name="paris", position=1, nodes=1, next_within_ns=24 * HOUR),
        observer_alive(**watched, name="london", position=41, nodes=7, next_within_ns=HOUR),
    ]
    publish(rig, feed, [own_advisory("web1", "new", 1, 0), own_advisory("web1", "new", 1, 0, name="rome")])
    publish(rig, feed, heartbeats)
    rig.drain()
    assert rig.rows("SELECT name FROM global_summary WHERE blind") == []
    settings = rig.settings()
    assert find_work(settings, SITE)[0] is None

    def watched_check() -> AssetCheckResult:
        (report,) = rig.drain().values()
        with rig.open() as site:
            (result,) = (result for result in check_feed(site, report) if result.check_name == "sites_watched")
        return result

    rig.travel(hours=2)
    assert find_work(settings, SITE)[0] == f"{SITE}/{feed}: a heartbeat is overdue"
    result = watched_check()
    assert not result.passed
    assert (result.description or "").startswith("blind: london/NODES (last heartbeat 20")
    assert find_work(settings, SITE)[0] is None, "reported silence requested another run"
    columns = "name, blind, observer_alive_at IS NOT NULL AS received, nodes, position, tracked_nodes"
    assert [tuple(row.values()) for row in rig.rows(f"SELECT {columns} FROM global_summary ORDER BY name")] == [
        ("london", True, True, 1, 41, 7),
        ("paris", False, True, 0, 1, 1),
        ("rome", False, False, 1, None, None),
    ]

    publish(rig, feed, heartbeats)
    assert watched_check().passed
    assert rig.rows("SELECT name FROM global_summary WHERE blind") == []
    assert rig.row("SELECT count(*) AS n FROM global_availability")["n"] == 2, "a heartbeat was counted as a node"


def test_site_sends_one_heartbeat_per_period_to_its_centre(rig: Rig) -> None:
    source, listened = rig.make(), rig.make("ADVISORIES")
    observers = rig.make("OBSERVERS", subjects=[f"sr_assets.observer_alive.*.*.{source}"])
    rig.publish(source, [Sent(b'{"sender": "web1"}'), Sent(b'{"sender": "web2"}')])
    tracked = {"inspect_field": "sender", "inspect_duration": "10h", "advisory": {"subject": f"{listened}.%s.%v"}}
    rig.add(source, target_subject_prefix="c", **tracked)
    for stream in (listened, observers):
        rig.add_feed(stream, url=rig.source.url)
    rig.drain()
    rig.drain()
    (heartbeat,) = (json.loads(message.payload) for message in rig.stored(observers))
    published = [message.payload for stream in (observers, listened) for message in rig.stored(stream)]
    assert [problem for payload in published for problem in unknown_or_wrong(payload)] == []
    subjects = {message.subject for message in rig.stored(observers)}
    assert subjects == {f"sr_assets.observer_alive.{SITE}.{SITE}.{source}"}
    content = [heartbeat[key] for key in ("event", "position", "lag_messages", "nodes")]
    assert content == ["observer_alive", 2, 0, 2]
    advised = [json.loads(message.payload) for message in rig.stored(listened)]
    assert {advisory["event"] for advisory in advised} == {"new"}, "the heartbeat went to advisory consumers"
    assert {advisory["epoch"] for advisory in advised} == {heartbeat["epoch"]}
    row = rig.row("global_summary")
    shown = [row[column] for column in ("replicator", "name", "stream", "nodes", "tracked_nodes")]
    assert shown == [SITE, SITE, source, 2, 2]
    assert not row["blind"]
    assert row["observer_alive_at"] > row["last_advisory_at"]
    # A busy run postpones its first heartbeat, unless the centre's deadline has passed.
    with rig.open() as site:
        entry, state = site.entries[0], site.state.load_stream(source)
        assert isinstance(entry, StreamSettings)
        assert state is not None
        assert state.as_of_ns is not None
        site.clock.set(state.as_of_ns)
        for ago_seconds, heartbeats in ((0, 1), (3600, 2)):
            state.alive_ns = state.alive_due_ns = state.as_of_ns - ago_seconds * 10**9
            report, grace_ns = StreamReport(entry, state=state), heartbeat_grace_ns(site.settings)
            stage = HeartbeatStage(entry, site.state, site.clock, grace_ns, report)
            stage.send(site.clusters.connect(entry.source), busy=True)
            assert len(rig.stored(observers)) == heartbeats


def test_overtaken_or_recreated_feed_behaves_like_a_stream(rig: Rig, feed: str) -> None:
    publish(rig, feed, [own_advisory(f"n{number}", "new", 1, number) for number in range(6)])
    rig.drain()
    publish(rig, feed, [own_advisory(f"m{number}", "new", 1, number) for number in range(4)])
    rig.api(f"STREAM.PURGE.{feed}", {"seq": 9}, rig.target)
    rig.drain()
    gap = rig.row("gaps")
    assert (gap["first_sequence"], gap["last_sequence"], gap["messages"], gap["reason"]) == (7, 8, 2, "overtaken")
    rig.api(f"STREAM.DELETE.{feed}", server=rig.target)
    rig.create(feed, rig.target)
    publish(rig, feed, [own_advisory("n1", "timeout", 2, 500)])
    assert "was recreated" in rig.failure()
    rig.feeds[0]["on_source_reset"] = "recopy"
    rig.drain()
    status = {row["node"]: row["status"] for row in rig.rows("global_availability")}
    assert status == {f"n{number}": "up" for number in range(6)} | {"m2": "up", "m3": "up", "n1": "timeout"}
    assert rig.row("SELECT count(*) AS n FROM global_advisories")["n"] == 9


def test_feed_history_expires_by_the_feed_clock(rig: Rig, feed: str) -> None:
    publish(rig, feed, [own_advisory("web1", "new", 1, 0), b"nothing"])
    rig.drain()
    assert len(rig.rows("global_advisories")) == 1, "retention used the event time"
    rig.travel(hours=2)
    rig.drain(advisories={"retention": "1h"})
    assert (rig.rows("global_advisories"), rig.rows("global_rejects")) == ([], [])
    assert len(rig.rows("global_availability")) == 1


@pytest.mark.parametrize("days_ahead", (0, 40), ids=("correct_clock", "clock_ahead"))
def test_retired_node_expires_but_not_under_a_clock_ahead(rig: Rig, feed: str, days_ahead: int) -> None:
    rig.feeds[0]["retired_retention"] = "20d"
    now, day = time.time() - BASE, 86_400
    lives_of = (("old", 30), ("young", 1))
    publish(rig, feed, [own_advisory(node, "expire", 3, now - ago * day) for node, ago in lives_of])
    publish(rig, feed, [own_advisory("silent", "timeout", 2, now - 30 * day)])
    rig.drain()
    with SiteState(rig.home / "sites" / SITE) as state:
        state.connection.execute("UPDATE streams SET watermark_ns = watermark_ns + ?", [days_ahead * day * 10**9])
    rig.drain(advisories={"retention": "10d"})
    assert {row["node"] for row in rig.rows("global_availability")} == {"young", "silent"}
    assert len(rig.rows("global_advisories")) == 3


def test_other_site_changes_no_node_and_no_heartbeat(rig: Rig) -> None:
    """The replicator of one city announces another one's node and heartbeat on its own subject."""
    feed = rig.make("ADV", rig.target)
    sites = [{"replicator": "EAST", "name": site, "subjects": f"{feed}.{site}.>"} for site in ("paris", "london")]
    rig.add_feed(feed, sites=sites)
    ours = [own_advisory("web1", "new", 1, 0, name="paris"), own_advisory("web1", "timeout", 2, 100, name="paris")]
    alive = {"event": "observer_alive", "replicator": "EAST", "name": "paris", "stream": "NODES"}
    forged = [
        own_advisory("web1", "recover", 3, 200, name="paris"),
        own_advisory("web1", "recover", 2**63 - 1, 200, name="paris", epoch=2**63 - 1),
        own_advisory("web1", "new", 1, 0, name="rome"),
        {**alive, "next_within_seconds": 10**9},
    ]
    rig.publish(feed, [Sent(json.dumps(each).encode(), "paris.adv") for each in ours], rig.target)
    rig.publish(feed, [Sent(json.dumps(each).encode(), "london.adv") for each in forged], rig.target)
    rig.drain()
    assert {(row[1], row[3], row[4]) for row in global_rows(rig)} == {("paris", "web1", "timeout")}
    reasons = sorted(row["reason"] for row in rig.rows("SELECT reason FROM global_rejects"))
    assert reasons == ["bad_field", "foreign_site", "foreign_site", "foreign_site"]
    assert rig.rows("SELECT name FROM site_summary WHERE name = 'rome'") == []


def test_streams_and_nodes_of_a_site_at_the_centre_are_bounded(rig: Rig, feed: str) -> None:
    """A site invents streams, by heartbeats too, and nodes; the rows of another site and its own known ones go on."""
    rig.feeds[0] |= {"max_streams": 2, "max_nodes": 3, "batch_messages": 7}
    alive = {"event": "observer_alive", "replicator": "EAST", "name": "london", "next_within_seconds": 5}
    ours = [own_advisory(f"n{number}", "new", 1, number) for number in range(2)]
    paris = [own_advisory(f"p{number}", "new", 1, number, name="paris") for number in range(2)]
    invented = [{**alive, "stream": f"S{number}"} for number in range(5)]
    invented += [own_advisory("x", "new", 1, 0, stream=f"T{number}") for number in range(3)]
    invented += [own_advisory(f"m{number}", "new", 1, number) for number in range(5)]
    publish(rig, feed, [*ours, *invented, *paris, own_advisory("n0", "timeout", 2, 100)])
    rig.drain()
    streams = rig.rows("SELECT name, stream FROM global_summary ORDER BY ALL")
    assert [tuple(row.values()) for row in streams] == [("london", "NODES"), ("london", "S0"), ("paris", "NODES")]
    nodes = [(row[3], row[4]) for row in sorted(global_rows(rig))]
    assert nodes == [("m0", "up"), ("n0", "timeout"), ("n1", "up"), ("p0", "up"), ("p1", "up")]
    rejects = rig.rows("SELECT reason, field, excerpt FROM global_rejects ORDER BY sequence")
    assert [row["reason"] for row in rejects] == ["too_many_streams"] * 7 + ["too_many_nodes"] * 4
    assert [row["excerpt"] for row in rejects[-5:-3]] == ["EAST/london/T2/x", "EAST/london/NODES/m1"]
    assert rig.row("replication")["parked_messages"] == 11
