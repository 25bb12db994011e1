"""Node status by the committed watermark, between runs and within them."""

import json
from typing import Any

import pyarrow as pa
import pytest

from sr_assets.adapters.spark.source import read_here
from sr_assets.adapters.state.counters import Counter
from sr_assets.adapters.state.status_file import read_status
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.messages import Message
from sr_assets.stages.report import Stage
from sr_assets.stages.source import reading
from sr_assets_tests.comparison import compare
from sr_assets_tests.reference import Rules, by_field
from sr_assets_tests.rig import SITE, Rig, Sent

SECOND = 10**9
SHORT = {"inspect_field": "sender", "inspect_duration": "2s", "warn_duration": "1s"}


def from_sender(*names: str) -> list[Sent]:
    return [Sent(json.dumps({"sender": name}).encode()) for name in names]


def events(rig: Rig) -> list[tuple[str, str]]:
    return [(row["node"], row["event"]) for row in rig.rows("SELECT * FROM node_advisories ORDER BY node, transition")]


def drain_until_watermark(rig: Rig, at_ns: int) -> None:
    while rig.row("SELECT epoch_us(watermark) AS us FROM replication")["us"] * 1000 <= at_ns:
        rig.drain()


def test_silent_nodes_time_out_and_retire_without_messages(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, from_sender("a", "b"))
    rig.add(stream, **SHORT)
    rig.drain()
    last_ns = rig.stored(stream)[-1].stored_ns
    drain_until_watermark(rig, last_ns + 2 * SECOND)
    assert events(rig) == [(node, event) for node in ("a", "b") for event in ("new", "timeout", "expire")]
    assert rig.row("site_summary") | {"as_of": None} == {
        "name": SITE,
        "stream": stream,
        "nodes": 0,
        "up": 0,
        "timeout": 0,
        "retired": 2,
        "new_24h": 2,
        "as_of": None,
    }
    assert not rig.rows("last_seen_nodes")
    assert [row["times_retired"] for row in rig.rows("retired_nodes")] == [1, 1]
    status = read_status(rig.home / "sites" / SITE)["streams"][stream]
    assert status["next_deadline_ns"] is None
    rig.publish(stream, from_sender("a"))
    rig.drain()
    returned = rig.row("SELECT * FROM node_advisories WHERE node = 'a' AND returned")
    assert (returned["event"], returned["previous"], returned["transition"]) == ("new", "retired", 4)
    assert returned["outage_seconds"] > 2
    assert [json.loads(copy.payload)["sender"] for copy in rig.copies(stream)] == ["a", "b", "a"]


def test_sweep_reports_each_transition_once(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, from_sender("a"))
    rig.add(stream, **SHORT)
    # NODE_STATE needs only the source.
    rig.entries[0]["target_url"] = "nats://127.0.0.1:2"
    rig.drain(stages=[Stage.NODE_STATE])
    assert events(rig) == [("a", "new")]
    while len(events(rig)) < 2:
        rig.drain(stages=[Stage.NODE_STATE])
    for _ in range(3):
        rig.drain(stages=[Stage.NODE_STATE])
    assert events(rig)[:2] == [("a", "new"), ("a", "timeout")]
    assert len(set(events(rig))) == len(events(rig))


def test_transitions_from_history_are_published_as_late(rig: Rig) -> None:
    stream, advisories = rig.make(), rig.make("ADV")
    rig.publish(stream, from_sender("old"))
    stored_ns = rig.stored(stream)[0].stored_ns
    # The interval and the warning have passed on the server too when the site first reads the stream.
    rig.await_clock(stream, stored_ns + 4 * SECOND)
    rig.publish(stream, from_sender("fresh"))
    rig.add(stream, advisory={"subject": f"{advisories}.%s.%v"}, **SHORT)
    rig.drain()
    late = {(row["node"], row["event"]): row["late"] for row in rig.rows("node_advisories")}
    assert late["old", "new"]
    assert late["old", "timeout"]
    assert not late["fresh", "new"]
    published = {(body["value"], body["event"]): body["late"] for body in map(body_of, rig.stored(advisories))}
    assert published == late
    detected = rig.row("SELECT epoch_us(detected_at) AS at FROM node_advisories WHERE node = 'old' AND event = 'new'")
    assert detected["at"] * 1000 > stored_ns + 2 * SECOND


def body_of(message: Message) -> dict[str, object]:
    body: dict[str, object] = json.loads(message.payload)
    return body


def test_retired_nodes_are_deleted_after_their_retention(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, from_sender("a"))
    rig.add(stream, retired_retention="1s", **SHORT)
    rig.drain()
    drain_until_watermark(rig, rig.stored(stream)[0].stored_ns + 3 * SECOND)
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
    rig.publish(
        stream,
        [Sent(body.ljust(9_000 + n // 100 * 50), "a", b"NATS/1.0\r\nsender: a\r\n\r\n") for n in range(200)],
    )
    rig.add(stream, inspect_duration="1h", size_trigger=50, **keys)
    rig.entries[0] |= {key: value.format(stream) for key, value in keys.items() if key == "filter_subject"}
    read: list[dict[str, str]] = []

    def record_read(options: dict[str, str]) -> pa.Table:
        read.append(options)
        return read_here(options)

    monkeypatch.setattr(reading, "read_here", record_read)
    rig.drain(spark={"from_messages": 1_000_000})
    assert [options.get("headers_only") == "true" for options in read] == [expected] * len(read)
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
