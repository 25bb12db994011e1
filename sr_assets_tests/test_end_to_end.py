"""A fleet's history through the whole platform, compared with the reference message by message.

`reference` computes the expected copies and transitions from the stored times of the source's messages. The runs split the
history at arbitrary points.
"""

import json
import random
import time
from collections.abc import Iterator

import pytest

from sr_assets.domain import sizing
from sr_assets_bench.comparison.streams import compare
from sr_assets_bench.comparison.tables import Kind
from sr_assets_tests import reference
from sr_assets_tests.reference import SECOND, Rules, Seen, by_field
from sr_assets_tests.rig import SITE, Rig, Sent, in_background

INTERVAL, WARNING = 3 * SECOND, 1 * SECOND
NODES = [*(f"node{n}.dc.example.net" for n in range(14)), "a b*>.c", "größe ☃", "x" * 255, "%s/%v"]
HEADERS = (b"", b"NATS/1.0\r\n\r\n", b"NATS/1.0\r\nA: 1\r\nA: 2\r\nnats-ttl: 5\r\nB:\t\xff \r\n\r\n")


def history(seed: int, seconds: float) -> Iterator[tuple[float, str, Sent]]:
    """Return (time, node, message) in time order, of nodes that appear, fall silent, recover and send larger messages."""
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
    untracked = (b"", b"not json", b'{"sender": null}', b'{"sender": {"a": "b"}}', b"\xff\xfe")
    planned.extend((chance.uniform(0, seconds), "", Sent(payload, "s")) for payload in untracked)
    return iter(sorted(planned, key=lambda report: report[0]))


def with_sender_in_header(node: str, message: Sent) -> Sent:
    lines = message.headers[10:-2] if message.headers else b""
    own = b"" if not node else b"Sender: \t%b \r\nSender: second\r\nsender: other\r\n" % node.encode()
    return Sent(message.payload, message.subject, b"NATS/1.0\r\n" + own + lines + b"\r\n")


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


@pytest.mark.nightly
def test_copies_and_transitions_match_the_reference(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    # So that larger batches with senders in headers or subjects are read without payloads.
    monkeypatch.setattr(sizing, "_FETCHED_BYTES", 3_000)
    plain, headed, tokens = rig.make("PLAIN"), rig.make("HEADED"), rig.make("TOKENS")
    advisories = rig.make("ADV")
    common = {"inspect_duration": "3s", "warn_duration": "1s"}
    with_advisories = {"advisory": {"subject": f"{advisories}.%s.%v", "reliable": True}}
    rig.add(plain, inspect_field="sender", inspect_force_field="force", size_trigger=100, **common, **with_advisories)
    rig.add(
        headed,
        inspect_header="Sender",
        workers=2,
        batch_messages=60,
        target_subject_prefix="eu",
        **common,
        **with_advisories,
    )
    rig.add(tokens, inspect_subject_token=3, order="none", workers=2, **common)
    rules = {
        plain: Rules(SITE, SITE, plain, INTERVAL, WARNING, "sender", by_field, is_forced, 100),
        headed: Rules(SITE, SITE, headed, INTERVAL, WARNING, "Sender", by_header),
        tokens: Rules(SITE, SITE, tokens, INTERVAL, WARNING, "3", by_token),
    }
    rig.run()  # the engine and the session are warm before the clock starts
    with in_background(lambda: live(rig, plain, headed, tokens, 10.0)) as fleet:
        while not fleet.done():
            rig.drain()
    end = max(rig.info(stream).last_stored_ns or 0 for stream in rules) + INTERVAL
    while any(row["watermark"] <= (reference.clock(end) or 0) for row in rig.rows("replication")):
        rig.drain()
    for stream, rule in rules.items():
        prefix, feed = "eu." if stream == headed else "", None if stream == tokens else advisories
        assert_matches_reference(rig, rule, prefix, feed, in_order=stream == plain)
    subjects = {message.subject.split(".", 2)[2] for message in rig.stored(advisories)}
    assert {"a%20b%2A%3E.c", "gr%C3%B6%C3%9Fe%20%E2%98%83", "%25s%2F%25v"} <= subjects


def live(rig: Rig, plain: str, headed: str, tokens: str, seconds: float) -> None:
    started = time.monotonic()
    for at, node, message in history(7, seconds):
        time.sleep(max(0.0, started + at - time.monotonic()))
        rig.publish(plain, [message])
        rig.publish(headed, [with_sender_in_header(node, message)])
        rig.publish(tokens, [message])


def assert_matches_reference(rig: Rig, rules: Rules, prefix: str, feed: str | None, *, in_order: bool) -> None:
    comparison = compare(rig, rules, prefix=prefix, feed=feed)
    assert [
        difference for difference in comparison.differences if in_order or difference.kind is not Kind.DISORDERED
    ] == []
    counted = rig.row(f"SELECT * FROM replication WHERE stream = '{rules.stream}'")
    assert counted["no_sender_messages"] == list(comparison.expected.reasons.values()).count("no_sender")
    # The history must contain every kind of decision.
    assert set(comparison.expected.reasons.values()) >= {"new", "interval", "sampled"}
    assert {advisory["event"] for advisory in comparison.expected.advisories} == {"new", "timeout", "recover", "expire"}
