"""A fleet's history through the whole platform, compared message by message and transition by transition.

What is expected is told by `reference`, from the stored times read back from the source. The runs cut the history
wherever they happen to be.
"""

import json
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from sr_assets_tests import reference
from sr_assets_tests.reference import SECOND, Expected, Rules, Seen, expect
from sr_assets_tests.rig import SITE, Rig, Sent

INTERVAL, WARNING = 3 * SECOND, 1 * SECOND
NODES = [*(f"node{n}.dc.example.net" for n in range(14)), "a b*>.c", "größe ☃", "x" * 255, "%s/%v"]
HEADERS = (b"", b"NATS/1.0\r\n\r\n", b"NATS/1.0\r\nA: 1\r\nA: 2\r\nnats-ttl: 5\r\nB:\t\xff \r\n\r\n")


def history(seed: int, seconds: float) -> Iterator[tuple[float, str, Sent]]:
    """Make (when, node, message) in order of time: nodes that appear, go silent for a while, come back, grow."""
    chance = random.Random(seed)
    planned = []
    for node in NODES:
        at = chance.uniform(0, seconds / 3)
        fill = 0
        while at < seconds:
            fill += chance.choice((0, 0, 30, 70))
            body = {"sender": node, "force": chance.choice((False, False, "true", 1, True)), "fill": "x" * fill}
            headers = chance.choice(HEADERS)
            planned.append(
                (at, node, Sent(json.dumps(body, ensure_ascii=False).encode(), f"s.{NODES.index(node)}", headers))
            )
            at += chance.choice((0.2, 0.3, 0.4, 0.9, 1.3, 2.2, 3.4))
    strangers = (b"", b"not json", b'{"sender": null}', b'{"sender": {"a": "b"}}', b"\xff\xfe")
    planned.extend((chance.uniform(0, seconds), "", Sent(payload, "s")) for payload in strangers)
    return iter(sorted(planned, key=lambda one: one[0]))


def with_sender_in_header(node: str, message: Sent) -> Sent:
    lines = message.headers[10:-2] if message.headers else b""
    own = b"" if not node else b"Sender: \t%b \r\nSender: second\r\nsender: other\r\n" % node.encode()
    return Sent(message.payload, message.subject, b"NATS/1.0\r\n" + own + lines + b"\r\n")


def by_field(message: Seen) -> str | None:
    try:
        document = json.loads(message.payload)
    except ValueError:
        return None
    found = document.get("sender") if isinstance(document, dict) else None
    return found if isinstance(found, str) else None


def by_header(message: Seen) -> str | None:
    for line in message.headers.split(b"\r\n"):
        if line.startswith(b"Sender:"):
            return line[7:].strip(b" \t").decode()
    return None


def by_token(message: Seen) -> str | None:
    tokens = message.subject.split(".")
    return tokens[2] if len(tokens) > 2 else None


def is_forced(message: Seen) -> bool:
    try:
        document = json.loads(message.payload)
    except ValueError:
        return False
    return isinstance(document, dict) and document.get("force") is True


def test_every_copy_and_every_transition_is_what_the_rules_say_wherever_the_runs_cut(rig: Rig) -> None:
    plain, headed, tokens = rig.make("PLAIN"), rig.make("HEADED"), rig.make("TOKENS")
    advisories = rig.make("ADV")
    common = {"inspect_duration": "3s", "warn_duration": "1s"}
    told = {"advisory": {"subject": f"{advisories}.%s.%v", "reliable": True}}
    rig.add(plain, inspect_field="sender", inspect_force_field="force", size_trigger=100, **common, **told)
    rig.add(headed, inspect_header="Sender", workers=2, batch_messages=60, target_subject_prefix="eu", **common, **told)
    rig.add(tokens, inspect_subject_token=3, order="none", workers=2, **common)
    rules = {
        plain: Rules(SITE, SITE, plain, INTERVAL, WARNING, "sender", by_field, is_forced, 100),
        headed: Rules(SITE, SITE, headed, INTERVAL, WARNING, "Sender", by_header),
        tokens: Rules(SITE, SITE, tokens, INTERVAL, WARNING, "3", by_token),
    }
    rig.run()  # the engine and the session are warm before the clock starts
    fleet = threading.Thread(target=live, args=(rig, plain, headed, tokens, 10.0))
    fleet.start()
    while fleet.is_alive():
        rig.drain()
    end = max(rig.info(stream).last_stored_ns or 0 for stream in rules) + INTERVAL
    while any(row["watermark"] <= (reference.clock(end) or 0) for row in rig.rows("replication")):
        rig.drain()
    for stream, rule in rules.items():
        compare(rig, rule, "eu." if stream == headed else "", in_order=stream == plain)
    compare_advisories(rig, advisories, rules[plain], rules[headed])


def live(rig: Rig, plain: str, headed: str, tokens: str, seconds: float) -> None:
    began = time.monotonic()
    for at, node, message in history(7, seconds):
        time.sleep(max(0.0, began + at - time.monotonic()))
        rig.publish(plain, [message])
        rig.publish(headed, [with_sender_in_header(node, message)])
        rig.publish(tokens, [message])


def compare(rig: Rig, rules: Rules, prefix: str, *, in_order: bool) -> None:
    stream = rules.stream
    seen = [Seen(m.sequence, m.stored_ns, m.subject, m.headers, m.payload) for m in rig.stored(stream)]
    (counted,) = rig.rows(f"SELECT *, epoch_us(watermark) AS now_us FROM replication WHERE stream = '{stream}'")
    expected = expect(rules, seen, counted["now_us"] * 1000)
    compare_copies(rig, rules, seen, expected, prefix, in_order=in_order)
    compare_tables(rig, rules, expected)
    assert counted["seen_messages"] == len(seen)
    assert counted["copied_messages"] == len(expected.copied)
    assert counted["skipped_messages"] == len(seen) - len(expected.copied)
    assert counted["no_sender_messages"] == list(expected.reasons.values()).count("no_sender")
    assert counted["late_sightings"] == 0
    # A history in which little happens would prove little.
    assert set(expected.reasons.values()) >= {"new", "interval", "sampled"}
    assert {one["event"] for one in expected.advisories} == {"new", "timeout", "recover", "expire"}


def compare_copies(
    rig: Rig, rules: Rules, seen: list[Seen], expected: Expected, prefix: str, *, in_order: bool
) -> None:
    created_ns = rig.info(rules.stream).created_ns
    source = {message.sequence: message for message in seen}
    copies = rig.copies(rules.stream)
    wanted = [
        (prefix + one.subject, reference.copied_headers(one, rules, created_ns), one.payload)
        for one in (source[sequence] for sequence in expected.copied)
    ]
    found = [(copy.subject, copy.headers, copy.payload) for copy in copies]
    assert sorted(found) == sorted(wanted)
    if in_order:
        assert found == wanted


def compare_tables(rig: Rig, rules: Rules, expected: Expected) -> None:
    nodes = {
        row["node"]: row
        for table in ("last_seen_nodes", "retired_nodes")
        for row in rig.rows(f"SELECT * FROM {table} WHERE stream = '{rules.stream}'")
    }
    assert nodes.keys() == expected.nodes.keys()
    for node, wanted in expected.nodes.items():
        row = nodes[node]
        names = ("first_seen", "last_seen")
        if wanted["status"] == "retired":
            assert (row["retired_at"], row["times_retired"]) == (wanted["status_since"], wanted["times_retired"])
        else:
            names += ("status", "status_since", "last_sequence", "last_copied", "copied_bytes")
        assert {name: row[name] for name in names} == {name: wanted[name] for name in names}
    for row in rig.rows(f"SELECT * FROM node_availability WHERE stream = '{rules.stream}'"):
        wanted = expected.nodes.pop(row["node"])
        assert all(row[key] == wanted[key] for key in ("status", "status_since", "first_seen", "last_seen"))
    assert not expected.nodes
    compare_transitions(rig, rules, expected)


def compare_transitions(rig: Rig, rules: Rules, expected: Expected) -> None:
    columns = "event_id, node, event, epoch_us(event_time) AS at, epoch_us(seen) AS seen, age_seconds, previous"
    more = "transition, returned, outage_seconds"
    found = rig.rows(f"SELECT {columns}, {more} FROM node_advisories WHERE stream = '{rules.stream}'")
    wanted = {one["event_id"]: one for one in expected.advisories}
    assert {row["event_id"] for row in found} == wanted.keys()
    assert len(found) == len(wanted)
    for row in found:
        one = wanted[row["event_id"]]
        assert (row["node"], row["seen"] // 10**6) == (one["value"], one["seen"])
        assert row["at"] // 10**6 == one["timestamp"]
        names = ("event", "age_seconds", "previous", "transition", "returned", "outage_seconds")
        assert {name: row[name] for name in names} == {name: one[name] for name in names}


def compare_advisories(rig: Rig, advisories: str, *rules: Rules) -> None:
    """What went out is what the tables say, once, in order for each node, on a subject no name can break."""
    wanted: dict[str, dict[str, Any]] = {}
    for rule in rules:
        seen = [Seen(m.sequence, m.stored_ns, m.subject, m.headers, m.payload) for m in rig.stored(rule.stream)]
        at = rig.row(f"SELECT epoch_us(watermark) AS us FROM replication WHERE stream = '{rule.stream}'")["us"] * 1000
        wanted |= {one["event_id"]: one for one in expect(rule, seen, at).advisories}
    order: dict[tuple[str, str], list[int]] = defaultdict(list)
    sent = rig.stored(advisories)
    for message in sent:
        body = json.loads(message.payload)
        assert isinstance(body.pop("late"), bool)
        assert body == wanted.pop(body["event_id"])
        assert b"Nats-Msg-Id: " + body["event_id"].encode() in message.headers
        assert message.subject.startswith(f"{advisories}.{body['event']}.")
        order[body["stream"], body["value"]].append(body["transition"])
    assert not wanted
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in order.values())
    subjects = {message.subject.split(".", 2)[2] for message in sent}
    assert {"a%20b%2A%3E.c", "gr%C3%B6%C3%9Fe%20%E2%98%83", "%25s%2F%25v"} <= subjects
    assert all(
        row["published_at"] for row in rig.rows(f"SELECT * FROM node_advisories WHERE stream = '{rules[0].stream}'")
    )
