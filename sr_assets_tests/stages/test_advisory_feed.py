"""The centre: advisory streams of all kinds folded into one view by real runs, compared with a fold told a second time."""

import json
import random
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from sr_assets_tests.rig import Rig, Sent

BASE = 1_700_000_000
STATUS = {"new": "up", "recover": "up", "timeout": "timeout", "expire": "retired"}
PREVIOUS = {"new": None, "timeout": "up", "recover": "timeout", "expire": "timeout"}
V2 = "io.choria.sr.v2.age_advisory"
V1 = "https://choria.io/schemas/sr/v1/age_advisory.json"


def ours(
    node: str, event: str, transition: int, at: float, *, name: str = "london", replicator: str = "EAST", **more: Any
) -> dict[str, Any]:
    """Return an advisory as we write them; `at` is in seconds after `BASE`."""
    moment = datetime.fromtimestamp(BASE, UTC) + timedelta(seconds=at)
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
        "event_time": moment.isoformat().replace("+00:00", "Z"),
        "sequence": 7,
        "transition": transition,
        "previous": ("retired" if transition > 1 else None) if event == "new" else PREVIOUS[event],
        "late": False,
        "returned": event == "new" and transition > 1,
        "age_seconds": 60.0,
        "outage_seconds": None,
    } | more


def go(node: str, event: str, at: int, *, replicator: str = "GO", **more: Any) -> dict[str, Any]:
    """Return an advisory of the forerunner."""
    told = {
        "protocol": V2,
        "event_id": f"{node}{event}{at}",
        "inspect_field": "sender",
        "age": 60,
        "seen": BASE + at - 60,
    }
    return told | {"replicator": replicator, "timestamp": BASE + at, "event": event, "value": node} | more


def old(node: str, event: str, at: int) -> dict[str, Any]:
    """Return an advisory of the replicator before that."""
    told = {"$schema": V1, "inspect": "sender", "value": node, "age": 60, "seen": BASE + at - 60}
    return told | {"replicator": "OLD", "timestamp": BASE + at, "event": event}


def lives(chance: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the lives of some nodes, in the order in which they happened, at sites of every kind."""
    for number in range(60):
        node, at = f"n{number}.example.net", chance.randrange(1000)
        story = ["new", *chance.choice(([], ["timeout"], ["timeout", "recover"], ["timeout", "expire", "new"]))]
        for transition, event in enumerate(story, 1):
            at += chance.randrange(1, 300)
            match number % 4:
                case 0:
                    yield go(node, event, at)
                case 1:
                    yield old(node, event, at)
                case _:
                    yield ours(node, event, transition, at + 0.25, name="paris" if number % 4 == 2 else "london")


def expected(history: list[dict[str, Any]]) -> set[tuple[Any, ...]]:
    """Fold a history: the highest transition, else the latest time and then the later event of a life."""
    cycle = ["new", "timeout", "recover", "expire"]
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one in history:
        key = one["replicator"], one.get("name"), one.get("stream"), one["value"]
        rank = (one.get("transition", 0), one["timestamp"], cycle.index(one["event"]))
        known = best.get(key)
        if known is None or rank > (known.get("transition", 0), known["timestamp"], cycle.index(known["event"])):
            best[key] = one
    rows = set()
    for key, one in best.items():
        at = BASE + (one["timestamp"] - BASE) + (0.25 if "transition" in one else 0)
        seen = at if STATUS[one["event"]] == "up" else one["seen"]
        origin = "ours" if "transition" in one else "v2" if "protocol" in one else "v1"
        moment = datetime.fromtimestamp(at, UTC)
        rows.add((*key, STATUS[one["event"]], moment, datetime.fromtimestamp(seen, UTC), moment, origin))
    return rows


def view(rig: Rig) -> set[tuple[Any, ...]]:
    columns = "replicator, name, stream, node, status, status_since, last_seen, event_time, source"
    return {tuple(row.values()) for row in rig.rows(f"SELECT {columns} FROM global_availability")}


def publish(rig: Rig, stream: str, told: list[Any]) -> None:
    bodies = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in told]
    rig.publish(stream, [Sent(body) for body in bodies], rig.target)


@pytest.fixture
def feed(rig: Rig) -> str:
    """A stream at the centre that the site's only feed reads."""
    stream = rig.make("FEED", rig.target)
    rig.add_feed(stream, batch_messages=70)
    return stream


def test_advisories_of_every_kind_shuffled_repeated_and_cut_give_the_view_that_their_history_has(
    rig: Rig, feed: str
) -> None:
    chance = random.Random(7)
    history = list(lives(chance))
    told = [*history, *chance.sample(history, 40)]
    chance.shuffle(told)
    for first in range(0, len(told), 90):
        publish(rig, feed, told[first : first + 90])
        rig.drain()
    assert view(rig) == expected(history)
    # The history has each of them once, with the time it was received first.
    stored = rig.copies(feed)
    assert rig.row("SELECT count(*) AS all, count(DISTINCT event_id) AS ids FROM global_advisories") == {
        "all": len(history),
        "ids": len(history),
    }
    first_at = {one.payload: one.stored_ns // 1000 for one in reversed(stored)}
    received = rig.rows("SELECT event_id, epoch_us(received_at) AS at FROM global_advisories WHERE source = 'v2'")
    ids = {one["event_id"]: first_at[json.dumps(one).encode()] for one in history if "protocol" in one}
    assert all(ids[row["event_id"]] == row["at"] for row in received)
    row = rig.row("replication")
    assert (row["seen_messages"], row["copied_messages"], row["lag_messages"]) == (len(told), len(told), 0)
    assert (row["target_stream"], row["next_sequence"]) == (None, len(told) + 1)
