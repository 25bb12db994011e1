"""The outbox under stress: thousands at once, nobody to take them, a server that dies amid them.

Every advisory arrives, once within the dedupe window, each sender's in order, and the table says what was acknowledged.
"""

import json
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from sr_assets.embedded.nats_server import NatsServer
from sr_assets_tests.rig import Rig, Sent


def from_senders(count: int, **more: int) -> list[Sent]:
    return [Sent(json.dumps({"sender": f"n{n}", **more}).encode()) for n in range(count)]


def assert_announced(rig: Rig, feed: str, server: NatsServer) -> int:
    """See that a feed has every recorded transition once, each sender's in order, all marked; return how many."""
    recorded = rig.rows("SELECT event_id, node, transition, published_at FROM node_advisories")
    announced = [json.loads(message.payload) for message in rig.stored(feed, server)]
    assert len(announced) == len(recorded)
    assert {event["event_id"] for event in announced} == {str(row["event_id"]) for row in recorded}
    by_sender = defaultdict(list)
    for advisory in announced:
        by_sender[advisory["value"]].append(advisory["transition"])
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in by_sender.values())
    assert all(row["published_at"] for row in recorded)
    return len(announced)


def test_ten_thousand_nodes_that_go_silent_at_once_are_all_announced_in_order(rig: Rig) -> None:
    stream, feed = rig.make(), rig.make("FEED")
    rig.publish(stream, from_senders(10_000))
    rig.add(
        stream,
        inspect_field="sender",
        inspect_duration="4s",
        warn_duration="2s",
        advisory={"subject": f"{feed}.%s.%v", "reliable": True},
    )
    rig.drain()
    while rig.row("SELECT count(*) AS n FROM retired_nodes")["n"] < 10_000:
        rig.drain()
    assert assert_announced(rig, feed, rig.source) == 30_000


def test_a_feed_that_is_away_for_a_while_loses_nothing_and_receives_nothing_twice(rig: Rig) -> None:
    stream, feed, kept = rig.make(), rig.unique("FEED"), rig.make("KEPT")
    made: dict[str, Any] = {"republish": {"src": f"{feed}.>", "dest": f"{kept}.>"}}
    advisory = {"subject": f"{feed}.%s.%v", "reliable": True}
    rig.add(stream, inspect_field="sender", inspect_duration="10h", advisory=advisory)
    for wave in range(4):
        if wave == 1:
            rig.create(feed, **made)
        elif wave == 2:
            rig.api(f"STREAM.DELETE.{feed}")
        elif wave == 3:
            rig.create(feed, **made)
        rig.publish(stream, from_senders(1_000 * (wave + 1)))
        (report,) = rig.drain().values()
        assert (report.undeliverable is None) == (report.waiting == 0) == bool(wave % 2), report
    assert assert_announced(rig, kept, rig.source) == 4_000


def test_a_server_killed_amid_an_outbox_takes_the_rest_when_it_is_back(rig: Rig, tmp_path: Path) -> None:
    stream = rig.make()
    rig.publish(stream, from_senders(10_000))
    with NatsServer(tmp_path, "mortal") as mortal:
        feed = rig.make("FEED", mortal)
        rig.add(
            stream,
            target_url=mortal.url,
            inspect_field="sender",
            inspect_duration="10h",
            advisory={"subject": f"{feed}.%s.%v", "cluster": "target", "reliable": True},
        )

        def kill() -> None:
            for messages in (2_500, 6_000):
                while rig.info(feed, mortal).messages < messages:
                    pass
                mortal.kill()
                time.sleep(1)  # an outage, not a wait for anything
                mortal.start()

        killer = threading.Thread(target=kill)
        killer.start()
        while killer.is_alive() or rig.rows("SELECT 1 FROM node_advisories WHERE published_at IS NULL"):
            rig.run()
        killer.join()
        assert assert_announced(rig, feed, mortal) == 10_000
        assert len(rig.stored(stream, mortal)) == 10_000
