"""The comparison that judges a soak sees everything that can be wrong: a site's work is spoiled by hand, each piece once."""

import json
from collections import Counter

import duckdb

from sr_assets_tests.comparison import Kind, compare
from sr_assets_tests.reference import SECOND, Rules, by_field
from sr_assets_tests.rig import SITE, Rig, Sent


def test_whatever_is_spoiled_is_seen(rig: Rig) -> None:
    stream, feed = rig.make(), rig.make("FEED")
    rules = Rules(SITE, SITE, stream, 3600 * SECOND, 1800 * SECOND, "sender", by_field)
    rig.add(
        stream,
        inspect_field="sender",
        inspect_duration="1h",
        advisory={"subject": f"{feed}.%s.%v", "reliable": True},
    )
    rig.publish(stream, [Sent(json.dumps({"sender": f"n{n % 6}", "n": n}).encode()) for n in range(12)])
    rig.drain()
    assert compare(rig, rules, feed=feed).differences == []

    def forge(sequence: int, payload: bytes) -> None:
        origin = f"Choria-SR-Source: {stream} {sequence} {SITE} {SITE} 0"
        rig.publish(stream, [Sent(payload, "m", f"NATS/1.0\r\n{origin}\r\n\r\n".encode())], rig.target)

    forge(2, b"another and once more, behind 6")
    forge(9, b"sampled")
    rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": 3}, rig.target)
    advisory = rig.stored(feed)[0]
    rig.publish(feed, [Sent(advisory.payload, advisory.subject.removeprefix(f"{feed}."), b"NATS/1.0\r\nA: b\r\n\r\n")])
    rig.api(f"STREAM.MSG.DELETE.{feed}", {"seq": 4})
    with duckdb.connect(str(rig.home / "fleet.duckdb")) as fleet:
        for view in ("last_seen_nodes", "node_advisories"):
            fleet.execute(
                f"CREATE TABLE spoiled AS FROM {view}; DROP VIEW {view}; ALTER TABLE spoiled RENAME TO {view}"
            )
        fleet.execute("UPDATE last_seen_nodes SET copied_bytes = 0 WHERE node = 'n0'")
        fleet.execute("DELETE FROM node_advisories WHERE node = 'n1'")
        fleet.execute("UPDATE node_advisories SET transition = 2, published_at = NULL WHERE node = 'n2'")
    assert Counter(difference.kind for difference in compare(rig, rules, feed=feed).differences) == {
        Kind.LOST: 1,
        Kind.DUPLICATE: 1,
        Kind.UNWANTED: 1,
        Kind.ALTERED: 1,
        Kind.DISORDERED: 1,
        Kind.ROW_WRONG: 1,
        Kind.TRANSITION_DOUBLED: 1,
        Kind.TRANSITION_MISSING: 2,
        # The one without its id, the number, the time.
        Kind.TRANSITION_WRONG: 3,
    }
