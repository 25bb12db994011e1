"""Node status by the committed watermark, between runs and within them, and the sweep in portions."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sr_assets.adapters import crash_points
from sr_assets.adapters.crash_points import Point
from sr_assets.adapters.published.fleet_file import Run
from sr_assets.adapters.published.fleet_reader import open_fleet, read_rows
from sr_assets.adapters.published.site_publishing import publish_site
from sr_assets.adapters.published.stream_status import PublishedStream
from sr_assets.adapters.range_rows import RangeRead
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.status_file import read_status
from sr_assets.adapters.state.store import SiteState
from sr_assets.adapters.state.stream_tables import Counter
from sr_assets.domain.blindness import BlindSpans
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.tracking.rows import node_row, node_table
from sr_assets.domain.tracking.rules import NodeState, Policy, Status
from sr_assets.settings import StreamSettings, load_settings
from sr_assets.stages.report import Stage, StreamReport
from sr_assets.stages.tracking.node_state import sweep_due
from sr_assets_bench.comparison.streams import compare
from sr_assets_tests.reference import Rules, by_field
from sr_assets_tests.rig import SITE, Rig, Sent
from sr_assets_tests.stages.tracking.test_node_advisories import from_sender

SECOND = 10**9
SHORT = {"inspect_field": "sender", "inspect_duration": "2h", "warn_duration": "1h"}
POLICY = Policy(3_600 * SECOND, 1_800 * SECOND)
NOW_NS = 20_000 * SECOND
BLIND = BlindSpans(((15_000 * SECOND, 15_600 * SECOND),))
#: Seconds, on both sides of each limit, with and without the blind span.
SILENCES = (0, 1_799, 1_800, 1_801, 2_401, 3_599, 3_600, 3_601, 4_200, 4_201, 9_000)


def events(rig: Rig) -> list[tuple[str, str]]:
    return [(row["node"], row["event"]) for row in rig.rows("SELECT * FROM node_advisories ORDER BY node, transition")]


def test_silent_nodes_time_out_and_retire_without_messages(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, from_sender("a", "b"))
    rig.add(stream, **SHORT)
    rig.drain()
    for _ in range(2):
        rig.travel(minutes=61)
        rig.drain()
    assert events(rig) == [(node, event) for node in ("a", "b") for event in ("new", "timeout", "expire")]
    counts = {"nodes": 0, "up": 0, "timeout": 0, "retired": 2, "new_24h": 2, "outage": None, "outage_since": None}
    assert rig.row("site_summary") | {"as_of": None} == {"name": SITE, "stream": stream, **counts, "as_of": None}
    assert not rig.rows("last_seen_nodes")
    assert [row["times_retired"] for row in rig.rows("retired_nodes")] == [1, 1]
    status = read_status(rig.home / "sites" / SITE).streams[stream]
    assert status.next_deadline_ns is None
    rig.publish(stream, from_sender("a"))
    rig.drain()
    returned = rig.row("SELECT * FROM node_advisories WHERE node = 'a' AND returned")
    assert (returned["event"], returned["previous"], returned["transition"]) == ("new", "retired", 4)
    assert returned["outage_seconds"] > 7_200
    assert [json.loads(copy.payload)["sender"] for copy in rig.copies(stream)] == ["a", "b", "a"]


def test_senders_beyond_max_nodes_are_copied_and_counted(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    stream = rig.make()
    rig.publish(stream, from_sender("a", "b", "forged 1", "forged 2", "a"))
    rig.add(stream, **SHORT, max_nodes=2)
    rig.drain()
    rig.publish(stream, from_sender("forged 3", "forged 1", "b"))
    rig.drain()
    assert events(rig) == [("a", "new"), ("b", "new")]
    sampled = ["a", "b", "forged 1", "forged 2", "forged 3", "forged 1"]
    assert [json.loads(copy.payload)["sender"] for copy in rig.copies(stream)] == sampled
    with SiteState(rig.home / "sites" / SITE) as state:
        assert state.counters(stream).totals()[Counter.REFUSED_SENDERS] == {"": 4.0}
    warnings = [record.message for record in caplog.records if "max_nodes" in record.message]
    assert len(warnings) == 2
    # The limit is of nodes, so a known one is tracked although the stream is full.
    assert rig.row("SELECT count(*) AS count FROM last_seen_nodes") == {"count": 2}


def test_sweep_reports_each_transition_once(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, from_sender("a"))
    rig.add(stream, **SHORT)
    # NODE_STATE needs only the source.
    rig.entries[0]["target_url"] = "nats://127.0.0.1:2"
    rig.drain(stages=[Stage.NODE_STATE])
    assert events(rig) == [("a", "new")]
    rig.travel(minutes=61)
    for _ in range(3):
        rig.drain(stages=[Stage.NODE_STATE])
        assert events(rig) == [("a", "new"), ("a", "timeout")]


def test_transitions_from_history_are_published_as_late(rig: Rig) -> None:
    stream, advisories = rig.make(), rig.make("ADV")
    rig.publish(stream, from_sender("old"))
    stored_ns = rig.stored(stream)[0].stored_ns
    # The interval and the warning have passed when the site first reads the stream.
    rig.travel(hours=4)
    rig.publish(stream, from_sender("fresh"))
    rig.add(stream, advisory={"subject": f"{advisories}.%s.%v"}, **SHORT)
    rig.drain()
    late = {(row["node"], row["event"]): row["late"] for row in rig.rows("node_advisories")}
    assert late["old", "new"]
    assert late["old", "timeout"]
    assert not late["fresh", "new"]
    bodies = [json.loads(message.payload) for message in rig.stored(advisories)]
    assert {(body["value"], body["event"]): body["late"] for body in bodies} == late
    detected = rig.row("SELECT epoch_us(detected_at) AS at FROM node_advisories WHERE node = 'old' AND event = 'new'")
    assert detected["at"] * 1000 > stored_ns + 3 * 3_600 * SECOND


def test_retired_nodes_are_deleted_after_their_retention(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, from_sender("a"))
    rig.add(stream, retired_retention="1h", **SHORT)
    rig.drain()
    for _ in range(3):
        rig.travel(minutes=61)
        rig.drain()
    rig.drain()
    assert not rig.rows("node_availability")
    assert [event for _, event in events(rig)] == ["new", "timeout", "expire"]
    rig.publish(stream, from_sender("a"))
    rig.drain()
    newest = rig.rows("SELECT * FROM node_advisories WHERE event = 'new' ORDER BY event_time")[-1]
    assert (newest["previous"], newest["returned"], newest["transition"]) == (None, False, 4)


@pytest.mark.parametrize(
    ("keys", "expected"),
    (
        ({"inspect_header": "sender"}, True),
        ({"inspect_subject_token": 2, "filter_subject": "{}.>"}, True),
        ({"inspect_header": "sender", "inspect_force_field": "force"}, False),
        ({"inspect_field": "sender"}, False),
    ),
)
def test_sender_outside_the_payload_needs_only_headers(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], *, expected: bool
) -> None:
    stream = rig.make()
    body = json.dumps({"sender": "a", "force": False}).encode()
    headers = b"NATS/1.0\r\nsender: a\r\n\r\n"
    rig.publish(stream, [Sent(body.ljust(9_000 + n // 100 * 50), "a", headers) for n in range(200)])
    rig.add(stream, inspect_duration="1h", size_trigger=50, **keys)
    rig.entries[0] |= {key: value.format(stream) for key, value in keys.items() if key == "filter_subject"}
    reads, table = list[RangeRead](), RangeRead.table

    def record_read(read: RangeRead, wanted: SequenceRange) -> pa.Table:
        reads.append(read)
        return table(read, wanted)

    monkeypatch.setattr(RangeRead, "table", record_read)
    rig.drain()
    assert reads
    assert [read.headers_only for read in reads] == [expected] * len(reads)
    assert [(len(copy.payload), copy.payload.strip()) for copy in rig.copies(stream)] == [(9_000, body), (9_050, body)]
    with SiteState(rig.home / "sites" / SITE) as state:
        assert state.counters(stream).totals()[Counter.SEEN_BYTES][""] == 100 * (9_000 + 9_050)


def test_stream_far_behind_is_folded_in_larger_batches(rig: Rig) -> None:
    stream = rig.make()
    rules = Rules(SITE, SITE, stream, 3600 * SECOND, 1800 * SECOND, "sender", by_field)
    rig.add(stream, inspect_field="sender", inspect_duration="1h", batch_messages=10, catch_up_messages=60)
    for count, batches in ((100, 2), (39, 4)):
        rig.publish(stream, from_sender(*(f"n{n % 30}" for n in range(count))))
        (report,) = rig.drain().values()
        assert report.batches == batches
    assert compare(rig, rules).differences == []


@pytest.fixture
def stream(tmp_path: Path) -> StreamSettings:
    entry = {"stream": "REG", "source_url": "nats://a:1", "target_url": "nats://b:1", "target_stream": "COPY"}
    tracked = {"inspect_field": "sender", "inspect_duration": "1h", "advisory": {"subject": "adv.%s.%v"}}
    file = tmp_path / "replication.yaml"
    file.write_text(json.dumps({"name": "london", "streams": [{**entry, **tracked}]}))
    return load_settings(file, {"SR_ASSETS_HOME": str(tmp_path)}).streams[0]


def fill(state: SiteState) -> int:
    """Write a fleet into a state, with equal deadlines of some nodes; return the number of due nodes."""
    fleet = {
        f"web{number}": NodeState(0, NOW_NS - silence * SECOND, number, 5, 5, status, 0, None, 0, number + 1)
        for number, (silence, status) in enumerate(
            (silence, status) for status in (Status.UP, Status.TIMEOUT) for silence in (*SILENCES, 2_401, 9_000)
        )
    }
    # These deadlines ignore the blind span, so some nodes are swept too early and stay unchanged.
    table = node_table([node_row(POLICY, name, node, BlindSpans()) for name, node in fleet.items()])
    with state.transaction():
        state.save_stream(StreamState("REG", 7, 99, epoch_ns=5, watermark_ns=NOW_NS, planned_ns=NOW_NS))
        state.nodes("REG").merge(table)
        state.nodes("REG").save_blind_spans(BLIND.spans)
    due: int = state.nodes("REG").due(NOW_NS, 1_000).num_rows
    return due


def committed(state: SiteState) -> list[list[tuple[Any, ...]]]:
    """Return the transitions in the order of writing, and the nodes."""
    queries = ("SELECT * FROM transitions ORDER BY rowid", "SELECT * FROM nodes ORDER BY node")
    return [state.connection.execute(query).fetchall() for query in queries]


def sweep_all(state: SiteState, stream: StreamSettings, at_once: int) -> StreamReport:
    assert stream.policy is not None
    report = StreamReport(stream)
    sweep_due(state, stream, stream.policy, report, at_once)
    return report


def test_sweep_commits_the_same_rows_with_every_portion_size(tmp_path: Path, stream: StreamSettings) -> None:
    with SiteState(tmp_path / "whole") as state:
        due = fill(state)
        report = sweep_all(state, stream, due)
        whole = committed(state)
        assert report.swept == due == 15
        assert report.events.total() == len(whole[0]) > due / 2
    for at_once in range(1, due):
        with SiteState(tmp_path / str(at_once)) as state:
            fill(state)
            assert sweep_all(state, stream, at_once).events == report.events
            assert committed(state) == whole
            assert not sweep_all(state, stream, at_once).swept


@pytest.mark.parametrize("portions", (1, 3))
def test_killed_sweep_publishes_committed_portions_and_continues(
    portions: int, tmp_path: Path, stream: StreamSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(point: Point) -> None:
        passed.append(point)
        if passed == [Point.SWEPT] * portions:
            raise KeyboardInterrupt

    with SiteState(tmp_path / "whole") as state:
        due = fill(state)
        sweep_all(state, stream, due)
        whole = committed(state)
    passed: list[Point] = []
    monkeypatch.setattr(crash_points, "hook", kill)
    with SiteState(tmp_path / "sites" / "london") as state:
        fill(state)
        with pytest.raises(KeyboardInterrupt):
            sweep_all(state, stream, 4)
    monkeypatch.setattr(crash_points, "hook", None)
    with SiteState(tmp_path / "sites" / "london") as state:
        half = committed(state)[0]
        assert half == whole[0][: len(half)]
        assert 0 < len(half) < len(whole[0])
        assert state.outbox("REG").size() == len(half)
        published = [PublishedStream("REG", "COPY", tracked=True)]
        publish_site(tmp_path, "london", state, published, sites=["london"], run=Run(NOW_NS, "test"))
        with open_fleet(tmp_path) as fleet:
            advised = read_rows(
                fleet,
                "SELECT node, max_by(event, transition) AS event FROM node_advisories GROUP BY node ORDER BY node",
            )
            current = "SELECT node, if(status = 'retired', 'expire', status) AS event FROM node_availability"
            silent = read_rows(fleet, f"{current} WHERE node IN (SELECT node FROM node_advisories) ORDER BY node")
        assert advised == silent
        assert sweep_all(state, stream, 4).swept == due - 4 * portions
        assert committed(state) == whole
