"""Problems that users of the Stream Replicator reported do not occur here."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from sr_assets.adapters.state.status_file import read_status
from sr_assets_tests.rig import SITE, Rig, Sent, wait_until
from sr_assets_tests.servers import NatsServer

SAMPLED = {"inspect_field": "sender", "inspect_duration": "10m"}
HOURS = {"inspect_field": "sender", "inspect_duration": "8h", "warn_duration": "6h"}
HOUR = 3_600 * 10**9


def from_sender(name: str, *, fill_bytes: int = 0, **more: Any) -> Sent:
    return Sent(json.dumps({"sender": name, "fill": "x" * fill_bytes, **more}).encode())


def payloads(rig: Rig, stream: str) -> list[bytes]:
    return [copy.payload for copy in rig.copies(stream)]


def events(rig: Rig, node: str = "%") -> list[str]:
    return [
        row["event"] for row in rig.rows(f"SELECT * FROM node_advisories WHERE node LIKE '{node}' ORDER BY transition")
    ]


def test_size_trigger_compares_with_the_last_copied_message(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, size_trigger=100, **SAMPLED)
    for fill in range(0, 301, 50):
        rig.publish(stream, [from_sender("a", fill_bytes=fill)])
        if fill in (100, 150):
            rig.drain()
    rig.drain()
    assert [len(json.loads(payload)["fill"]) for payload in payloads(rig, stream)] == [0, 100, 200, 300]


def test_size_triggered_copy_follows_after_a_target_outage(rig: Rig, tmp_path: Path) -> None:
    stream = rig.make()
    with NatsServer(tmp_path, "mortal") as mortal:
        rig.add(stream, size_trigger=100, target_url=mortal.url, **SAMPLED)
        rig.publish(stream, [from_sender("a")])
        rig.drain()
        rig.publish(stream, [from_sender("a", fill_bytes=500), from_sender("a", fill_bytes=510)])
        mortal.stop()
        assert mortal.address in rig.failure()
        behind = rig.row("replication")
        # The source is still read; the first of the two messages is due.
        assert (behind["lag_messages"], behind["queued_messages"], behind["source_last_sequence"]) == (0, 1, 3)
        mortal.start()
        rig.drain()
        assert [len(json.loads(copy.payload)["fill"]) for copy in rig.stored(stream, mortal)] == [0, 500]


def test_downtime_silences_no_sender_and_dates_a_death_correctly(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, **HOURS)
    rig.publish(stream, [from_sender("dies"), from_sender("alive")])
    rig.drain()
    # The downtime is longer than the interval.
    for _ in range(3):
        rig.travel(hours=3)
        rig.publish(stream, [from_sender("alive")])
    rig.drain()
    assert events(rig, "alive") == ["new"]
    assert events(rig, "dies") == ["new", "timeout", "expire"]
    recorded = rig.rows(
        "SELECT epoch_us(event_time) AS at FROM node_advisories WHERE node = 'dies' ORDER BY transition"
    )
    seen_ns = rig.stored(stream)[0].stored_ns
    assert [row["at"] for row in recorded] == [(seen_ns + after * HOUR) // 1000 for after in (0, 6, 8)]
    # A sensor can start a run exactly at the next deadline.
    deadline_ns = read_status(rig.home / "sites" / SITE).streams[stream].next_deadline_ns
    assert deadline_ns is not None
    assert deadline_ns - rig.stored(stream)[-1].stored_ns == 6 * HOUR


def test_target_outage_causes_no_timeouts_or_duplicates(rig: Rig, tmp_path: Path) -> None:
    stream = rig.make()
    with NatsServer(tmp_path, "mortal") as mortal:
        rig.add(stream, target_url=mortal.url, **HOURS)
        rig.publish(stream, [from_sender("alive")])
        rig.drain()
        mortal.stop()
        for _ in range(5):
            rig.travel(hours=2)
            rig.publish(stream, [from_sender("alive")])
            # A run with nothing to copy does not fail.
            rig.run()
        mortal.start()
        rig.drain()
        stored = rig.stored(stream, mortal)
        assert events(rig) == ["new"]
    assert len({copy.headers for copy in stored}) == len(stored) == 2 == rig.row("replication")["copied_messages"]


def test_thousands_of_advisories_wait_until_their_stream_exists(rig: Rig) -> None:
    stream, advisories = rig.make(), rig.unique("ADV")
    rig.publish(stream, [from_sender(f"n{n}") for n in range(1_500)])
    rig.add(stream, advisory={"subject": f"{advisories}.%s.%v", "reliable": True}, **SAMPLED)
    (report,) = rig.drain().values()
    assert report.undeliverable is not None
    assert f"{advisories}.*.>: 1500 advisories wait" in report.undeliverable
    assert rig.row("SELECT count(*) AS n, count(published_at) AS sent FROM node_advisories") == {"n": 1_500, "sent": 0}
    rig.create(advisories)
    (report,) = rig.drain().values()
    assert (report.undeliverable, report.published) == (None, 1_500)
    assert len({message.subject for message in rig.stored(advisories)}) == 1_500
    assert rig.row("SELECT count(published_at) AS sent FROM node_advisories")["sent"] == 1_500


def test_sender_names_cannot_inject_protocol(rig: Rig) -> None:
    stream, advisories = rig.make(), rig.make("ADV")
    names = ("a b", "*", ">", "x\r\nPUB evil 2\r\nhi\r\n", "..", "\t", "ü.de", "%41", "x" * 250, "\x00")
    rig.publish(stream, [from_sender(name) for name in names])
    rig.add(stream, advisory={"subject": f"{advisories}.%s.%v"}, **SAMPLED)
    rig.drain()
    subjects = {json.loads(message.payload)["value"]: message.subject for message in rig.stored(advisories)}
    assert subjects.keys() == set(names)
    assert subjects["a b"] == f"{advisories}.new.a%20b"
    assert subjects[".."] == f"{advisories}.new.%.%.%"
    assert subjects["x\r\nPUB evil 2\r\nhi\r\n"] == f"{advisories}.new.x%0D%0APUB%20evil%202%0D%0Ahi%0D%0A"
    assert len(rig.copies(stream)) == len(names)


def test_two_sites_share_a_target_without_loss(rig: Rig) -> None:
    stream = rig.make()
    rig.create(stream, rig.target)
    rig.publish(stream, [Sent(b"%d" % n) for n in range(3)])
    rig.add(stream)
    rig.add(stream, name="PARIS")
    for site in (SITE, "PARIS", SITE, "PARIS"):
        rig.drain(site)
    rig.publish(stream, [Sent(b"3"), Sent(b"4")])
    for site in ("PARIS", SITE):
        rig.drain(site)
    assert Counter(payloads(rig, stream)) == Counter([b"0", b"1", b"2", b"3", b"4"] * 2)
    assert {row["name"]: row["copied_messages"] for row in rig.rows("replication")} == {SITE: 5, "PARIS": 5}


def test_foreign_messages_and_copies_in_the_target_stop_nothing(rig: Rig) -> None:
    stream = rig.make()
    rig.create(stream, rig.target)
    origins = (f"{stream} 1 {SITE} PARIS 7", f"{stream} 1 PARIS {SITE} 7", f"OTHER 1 {SITE} {SITE} 7", "nonsense")
    foreign = [
        Sent(b"foreign", headers=f"NATS/1.0\r\nChoria-SR-Source: {origin}\r\n\r\n".encode()) for origin in origins
    ]
    rig.publish(stream, [*foreign, Sent(b"foreign")], rig.target)
    rig.add(stream)
    for n in range(3):
        rig.publish(stream, [Sent(b"%d" % n)])
        rig.drain()
        rig.publish(stream, [Sent(b"foreign")], rig.target)
    assert [payload for payload in payloads(rig, stream) if payload != b"foreign"] == [b"0", b"1", b"2"]


def test_created_target_does_not_inherit_the_sources_wiring(rig: Rig) -> None:
    origin, stream = rig.make("ORIGIN"), rig.make(no_ack=True, republish={"src": "nothing.>", "dest": "else.>"})
    rig.api(f"STREAM.UPDATE.{stream}", {**rig.info(stream).config, "sources": [{"name": origin}]})
    rig.publish(origin, [Sent(b"x")])
    wait_until(lambda: rig.info(stream).last_sequence == 1, "the message of the stream's own source")
    rig.add(stream)
    rig.drain()
    config = rig.info(stream, rig.target).config
    assert not config.get("no_ack")
    assert not {"sources", "mirror", "placement", "republish"} & {key for key, value in config.items() if value}
    # Messages from the stream's own sources keep their subjects, which the target does not take: they are parked.
    assert rig.row("replication")["next_sequence"] == 2
