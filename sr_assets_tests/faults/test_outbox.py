"""The outbox under stress: thousands of advisories, a missing feed, and a server killed during publication.

Every advisory arrives once within the dedupe window, in order per sender, and the table records the acknowledgements.
"""

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from sr_assets_tests.rig import Rig, Sent, in_background
from sr_assets_tests.servers import NatsServer


def from_senders(count: int, **more: int) -> list[Sent]:
    return [Sent(json.dumps({"sender": f"n{n}", **more}).encode()) for n in range(count)]


def assert_published_once(rig: Rig, feed: str, server: NatsServer) -> int:
    """Assert that a feed has every recorded transition once, in order per sender, all marked; return their number."""
    recorded = rig.rows("SELECT event_id, node, transition, published_at FROM node_advisories")
    published = [json.loads(message.payload) for message in rig.stored(feed, server)]
    assert len(published) == len(recorded)
    assert {event["event_id"] for event in published} == {str(row["event_id"]) for row in recorded}
    by_sender = defaultdict(list)
    for advisory in published:
        by_sender[advisory["value"]].append(advisory["transition"])
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in by_sender.values())
    assert all(row["published_at"] for row in recorded)
    return len(published)


def test_three_thousand_silent_nodes_are_published_in_order(rig: Rig) -> None:
    stream, feed = rig.make(), rig.make("FEED")
    rig.publish(stream, from_senders(3_000))
    rig.add(
        stream,
        inspect_field="sender",
        inspect_duration="4h",
        warn_duration="2h",
        advisory={"subject": f"{feed}.%s.%v", "reliable": True},
    )
    rig.drain()
    rig.travel(hours=5)
    rig.drain()
    assert rig.row("SELECT count(*) AS n FROM retired_nodes")["n"] == 3_000
    assert assert_published_once(rig, feed, rig.source) == 9_000


def test_feed_outage_loses_and_duplicates_nothing(rig: Rig) -> None:
    stream, feed, archive = rig.make(), rig.unique("FEED"), rig.make("KEPT")
    feed_config: dict[str, Any] = {"republish": {"src": f"{feed}.>", "dest": f"{archive}.>"}}
    advisory = {"subject": f"{feed}.%s.%v", "reliable": True}
    rig.add(stream, inspect_field="sender", inspect_duration="10h", advisory=advisory)
    for wave in range(4):
        if wave == 1:
            rig.create(feed, **feed_config)
        elif wave == 2:
            rig.api(f"STREAM.DELETE.{feed}")
        elif wave == 3:
            rig.create(feed, **feed_config)
        rig.publish(stream, from_senders(300 * (wave + 1)))
        (report,) = rig.drain().values()
        assert (report.undeliverable is None) == (report.waiting == 0) == bool(wave % 2), report
    assert assert_published_once(rig, archive, rig.source) == 1_200


def test_killed_server_receives_the_rest_of_the_outbox(rig: Rig, tmp_path: Path) -> None:
    stream = rig.make()
    rig.publish(stream, from_senders(5_000))
    with NatsServer(tmp_path, "target") as target:
        feed = rig.make("FEED", target)
        rig.add(
            stream,
            target_url=target.url,
            inspect_field="sender",
            inspect_duration="10h",
            advisory={"subject": f"{feed}.%s.%v", "cluster": "target", "reliable": True},
        )

        def kill() -> None:
            for messages in (1_200, 3_000):
                while rig.info(feed, target).messages < messages:
                    pass
                target.kill()
                time.sleep(1)  # an outage, not a synchronisation
                target.start()

        with in_background(kill) as killing:
            while not killing.done() or rig.rows("SELECT 1 FROM node_advisories WHERE published_at IS NULL"):
                rig.run()
        assert assert_published_once(rig, feed, target) == 5_000
        # The run that sent the last advisory may have given up copying during the outage.
        rig.drain()
        assert len(rig.stored(stream, target)) == 5_000
