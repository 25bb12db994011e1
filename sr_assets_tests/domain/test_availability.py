"""What an advisory says, and its fold: the same view whatever the order, the repetitions and the cuts."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.domain.advisories import PROTOCOL, observer_alive
from sr_assets.domain.availability import (
    LIFE_CYCLE,
    MAX_PAYLOAD_BYTES,
    Advisory,
    Observation,
    Reject,
    Rejected,
    Standing,
    fold,
    read_message,
)
from sr_assets.domain.positions import SECOND_NS
from sr_assets.domain.tracking import Status

NOW_NS = 1_700_000_000 * SECOND_NS
OURS = {
    "protocol": PROTOCOL,
    "event_id": "an-id",
    "replicator": "EAST",
    "name": "london",
    "stream": "NODES",
    "value": "web1",
    "event": "timeout",
    "timestamp": 1_699_999_000,
    "event_time": "2023-11-14T21:56:40.500000000Z",
    "seen": 1_699_998_940,
    "age": 60,
    "age_seconds": 60.25,
    "transition": 2,
    "previous": "up",
    "late": True,
    "returned": False,
    "outage_seconds": None,
}
V2 = {key: OURS[key] for key in ("protocol", "event_id", "replicator", "value", "event", "timestamp", "seen", "age")}
V1 = {"$schema": "https://choria.io/schemas/sr/v1/age_advisory.json", "inspect": "sender"} | {
    key: OURS[key] for key in ("replicator", "value", "event", "timestamp", "seen", "age")
}


def read(document: object) -> Advisory | Observation | Rejected:
    payload = document if isinstance(document, bytes) else json.dumps(document).encode()
    return read_message(payload, NOW_NS)


def advisory(document: object) -> Advisory:
    found = read(document)
    assert isinstance(found, Advisory), found
    return found


def test_ours_tells_everything() -> None:
    assert advisory(OURS) == Advisory(
        "EAST",
        "london",
        "NODES",
        "web1",
        2,
        1_699_999_000_500_000_000,
        1,
        1_699_998_940_000_000_000,
        "ours",
        "an-id",
        60.25,
        "up",
        late=True,
        returned=False,
        outage_seconds=None,
    )


def test_stream_replicators_tell_no_name_no_stream_and_no_transition() -> None:
    told = advisory(V2)
    assert told[:6] == ("EAST", "", "", "web1", 0, 1_699_999_000 * SECOND_NS)
    assert (told.origin, told.event_id, told.age_seconds) == ("v2", "an-id", 60.0)
    older = advisory(V1)
    assert older[:6] == told[:6]
    assert older.origin == "v1"
    # It has no id: the same one has the same made one, another another.
    assert older.event_id == advisory(V1 | {"age": 61}).event_id != advisory(V1 | {"timestamp": 1_699_999_001}).event_id


@pytest.mark.parametrize(
    "change", ({"seen": -62_135_596_800, "age": -1}, {"seen": None, "age": None}, {"seen": "x", "age": True})
)
def test_what_a_writer_does_not_know_of_a_node_is_not_known(change: dict[str, object]) -> None:
    told = advisory(V2 | change)
    assert (told.seen_ns, told.age_seconds) == (None, None)


@pytest.mark.parametrize(
    ("payload", "reason"),
    (
        (b"", Reject.NOT_JSON),
        (b"\xff\xfe", Reject.NOT_JSON),
        (b"[" * 60_000, Reject.NOT_JSON),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, Reject.NOT_JSON),
        (b'{"protocol": NaN}', Reject.NOT_JSON),
        (b'{"timestamp": ' + b"9" * 5_000 + b"}", Reject.NOT_JSON),
        (b"x" * (MAX_PAYLOAD_BYTES + 1), Reject.TOO_LARGE),
        (b"[]", Reject.NO_ADVISORY),
        (b"17", Reject.NO_ADVISORY),
        ({}, Reject.NO_ADVISORY),
        (V2 | {"protocol": "io.choria.lifecycle.v1.alive"}, Reject.NO_ADVISORY),
        (V1 | {"$schema": "https://choria.io/schemas/choria/v1/other.json"}, Reject.NO_ADVISORY),
        (V1 | {"$schema": ["x"]}, Reject.NO_ADVISORY),
        (V2 | {"event": "exploded"}, Reject.UNKNOWN_EVENT),
        (V2 | {"event": ["new"]}, Reject.UNKNOWN_EVENT),
        (V2 | {"event": None}, Reject.UNKNOWN_EVENT),
        (V2 | {"value": ""}, Reject.BAD_FIELD),
        (V2 | {"value": 7}, Reject.BAD_FIELD),
        (V2 | {"value": "\ud800"}, Reject.BAD_FIELD),
        (V2 | {"replicator": None}, Reject.BAD_FIELD),
        (OURS | {"name": {}}, Reject.BAD_FIELD),
        (V2 | {"value": "x" * 10_000}, Reject.TOO_LONG),
        (OURS | {"stream": "é" * 128}, Reject.TOO_LONG),
        (OURS | {"transition": 0}, Reject.BAD_FIELD),
        (OURS | {"transition": -3}, Reject.BAD_FIELD),
        (OURS | {"transition": True}, Reject.BAD_FIELD),
        (OURS | {"transition": "2"}, Reject.BAD_FIELD),
        (OURS | {"transition": 1 << 63}, Reject.BAD_FIELD),
        (V2 | {"timestamp": None}, Reject.BAD_TIME),
        (V2 | {"timestamp": "now"}, Reject.BAD_TIME),
        (V2 | {"timestamp": True}, Reject.BAD_TIME),
        (V2 | {"timestamp": -1}, Reject.BAD_TIME),
        (V2 | {"timestamp": 10**400}, Reject.BAD_TIME),
        (json.dumps(V2).replace("1699999000", "1e999").encode(), Reject.BAD_TIME),
        (OURS | {"event_time": "yesterday"}, Reject.BAD_TIME),
        (OURS | {"event_time": 17}, Reject.BAD_TIME),
        (OURS | {"event_time": "9999-12-31T23:59:59Z"}, Reject.BAD_TIME),
        (OURS | {"event": "recover", "transition": 1, "previous": "timeout"}, Reject.IMPOSSIBLE),
        (OURS | {"event": "recover", "previous": None}, Reject.IMPOSSIBLE),
        (OURS | {"event": "new", "previous": "up"}, Reject.IMPOSSIBLE),
        (OURS | {"previous": ["up"]}, Reject.IMPOSSIBLE),
        (V2 | {"timestamp": 1_700_000_000 + 3 * 3600}, Reject.CLOCK_AHEAD),
        ({"event": "observer_alive", "replicator": 7}, Reject.BAD_FIELD),
        ({"event": "observer_alive", "replicator": "EAST", "watermark": "x"}, Reject.BAD_TIME),
    ),
)
def test_what_is_no_advisory_is_kept_apart_with_the_reason(payload: object, reason: Reject) -> None:
    found = read(payload)
    assert isinstance(found, Rejected), found
    assert found.reason is reason


def test_a_clock_that_is_ahead_decides_nothing_where_the_transition_does_but_it_is_told() -> None:
    assert advisory(OURS | {"event_time": "2023-11-15T01:00:00Z"}).doubt is Reject.CLOCK_AHEAD
    assert advisory(OURS | {"event_time": "2023-11-14T22:40:00Z"}).doubt is None
    # Hours behind is what every message is that waited for a link.
    assert advisory(OURS | {"event_time": "2023-11-13T00:00:00Z"}).doubt is None


def test_a_recover_of_a_node_whose_beginning_nobody_heard_is_no_mistake() -> None:
    assert advisory(OURS | {"event": "recover", "transition": 3, "previous": "timeout"}).doubt is None


def test_a_site_that_says_it_watches_is_no_node() -> None:
    told = {"replicator": "EAST", "name": "london", "stream": "NODES"}
    body = observer_alive(
        **told, ts_ns=NOW_NS, watermark_ns=5, position=41, lag_messages=2, lag_ns=0, nodes=7, next_within_ns=SECOND_NS
    )
    assert read(body) == Observation(*told.values(), 5, 41, 2, 7, SECOND_NS)
    body = observer_alive(
        **told, ts_ns=NOW_NS, watermark_ns=None, position=0, lag_messages=0, lag_ns=0, nodes=0, next_within_ns=None
    )
    assert read(body) == Observation(*told.values(), None, 0, 0, 0, None)


@given(st.binary() | st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists))
def test_no_message_of_any_kind_raises(content: object) -> None:
    payload = content if isinstance(content, bytes) else json.dumps(OURS | {"value": content, "seen": content}).encode()
    read_message(payload, NOW_NS)


# ---------------------------------------------------------------------------------------------------------- the fold

times = st.integers(1, 6)
told = st.builds(
    lambda transition, at, cycle, node, name, seen, origin: Advisory(
        "EAST",
        name,
        "S",
        node,
        transition,
        at,
        cycle,
        seen,
        "ours" if transition else origin,
        "",
        None,
        None,
        late=False,
        returned=False,
        outage_seconds=None,
    ),
    st.integers(0, 3),
    times,
    st.integers(0, 3),
    st.sampled_from("ab"),
    st.sampled_from(("", "x")),
    st.none() | times,
    st.sampled_from(("v1", "v2")),
)
histories = st.lists(st.tuples(told, times), max_size=40)


@given(histories, st.randoms(use_true_random=False), st.data())
def test_order_repetitions_and_cuts_change_nothing(
    history: list[tuple[Advisory, int]], chance: random.Random, data: st.DataObject
) -> None:
    whole = fold({}, history)
    again = [*history, *(chance.choice(history) for _ in range(data.draw(st.integers(0, 20))) if history)]
    chance.shuffle(again)
    view: dict[tuple[str, str, str, str], Standing] = {}
    while again:
        cut = data.draw(st.integers(1, len(again)))
        view, again = fold(view, again[:cut]), again[cut:]
    assert view == whole


@given(histories)
def test_the_highest_transition_wins_and_without_one_the_latest(history: list[tuple[Advisory, int]]) -> None:
    for key, standing in fold({}, history).items():
        of_node = [one for one, _ in history if key == one[:4]]
        numbered = [one for one in of_node if one.transition]
        if numbered:
            assert standing.transition == max(one.transition for one in numbered)
        else:
            assert standing.event_ns == max(one.event_ns for one in of_node)
            assert standing.cycle == max(one.cycle for one in of_node if one.event_ns == standing.event_ns)


def test_an_event_says_how_a_node_stands_and_when_it_was_seen() -> None:
    def after(cycle: int) -> Standing:
        return Standing(1, 200, cycle, 100, "ours", 300)

    assert [after(cycle).status for cycle, _ in enumerate(LIFE_CYCLE)] == [
        Status.UP,
        Status.TIMEOUT,
        Status.UP,
        Status.RETIRED,
    ]
    assert [after(cycle).last_seen_ns for cycle, _ in enumerate(LIFE_CYCLE)] == [200, 100, 200, 100]
