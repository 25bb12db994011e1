"""Reading advisories of all formats, and a fold that does not depend on order, repetitions or batch boundaries."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.domain.advisories import NODE_PROTOCOL, PROTOCOL, SITE_PROTOCOL, observer_alive
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import CLOCK_TOLERANCE_NS, DAY_NS, SECOND_NS
from sr_assets.domain.received import (
    MAX_PAYLOAD_BYTES,
    RANK,
    REPORTED,
    STATUS,
    Advisory,
    NodeNotice,
    Observation,
    Reject,
    Rejected,
    SiteNotice,
    SitePath,
    SitePaths,
    read_message,
)
from sr_assets.domain.subjects import observer_subject
from sr_assets_tests.domain.advisory_fold import Key, Standing, fold

NOW_NS = 1_700_000_000 * SECOND_NS
FIELDS = {
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
    "epoch": 1_699_000_000_000_000_000,
    "previous": "up",
    "late": True,
    "returned": False,
    "outage_seconds": None,
}
V2 = {key: FIELDS[key] for key in ("protocol", "event_id", "replicator", "value", "event", "timestamp", "seen", "age")}
V1 = {"$schema": "https://choria.io/schemas/sr/v1/age_advisory.json", "inspect": "sender"} | {
    key: FIELDS[key] for key in ("replicator", "value", "event", "timestamp", "seen", "age")
}


def read(document: object) -> Advisory | Observation | NodeNotice | SiteNotice | Rejected:
    payload = document if isinstance(document, bytes) else json.dumps(document).encode()
    return read_message(payload, NOW_NS)


def advisory(document: object) -> Advisory:
    message = read(document)
    assert isinstance(message, Advisory), message
    return message


def test_own_advisory_is_read_completely() -> None:
    assert advisory(FIELDS) == Advisory(
        "EAST",
        "london",
        "NODES",
        "web1",
        1_699_000_000_000_000_000,
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


def test_own_advisory_without_epoch_has_epoch_zero() -> None:
    assert advisory({key: value for key, value in FIELDS.items() if key != "epoch"}).epoch_ns == 0


def test_stream_replicator_advisory_lacks_name_epoch_and_transition() -> None:
    newer = advisory(V2 | {"epoch": 5})
    assert newer[:7] == ("EAST", "", "", "web1", 0, 0, 1_699_999_000 * SECOND_NS)
    assert (newer.origin, newer.event_id, newer.age_seconds) == ("v2", "an-id", 60.0)
    older = advisory(V1)
    assert older[:7] == newer[:7]
    assert older.origin == "v1"
    # Its id is derived from its fields: equal for a repetition, different for another advisory.
    assert older.event_id == advisory(V1 | {"age": 61}).event_id != advisory(V1 | {"timestamp": 1_699_999_001}).event_id


@pytest.mark.parametrize(
    "change", ({"seen": -62_135_596_800, "age": -1}, {"seen": None, "age": None}, {"seen": "x", "age": True})
)
def test_invalid_seen_and_age_are_none(change: dict[str, object]) -> None:
    unknown = advisory(V2 | change)
    assert (unknown.seen_ns, unknown.age_seconds) == (None, None)


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
        (FIELDS | {"name": {}}, Reject.BAD_FIELD),
        (V2 | {"value": "x" * 10_000}, Reject.TOO_LONG),
        (FIELDS | {"stream": "é" * 128}, Reject.TOO_LONG),
        (FIELDS | {"transition": 0}, Reject.BAD_FIELD),
        (FIELDS | {"transition": -3}, Reject.BAD_FIELD),
        (FIELDS | {"transition": True}, Reject.BAD_FIELD),
        (FIELDS | {"transition": "2"}, Reject.BAD_FIELD),
        (FIELDS | {"transition": 1 << 63}, Reject.BAD_FIELD),
        (FIELDS | {"epoch": -1}, Reject.BAD_FIELD),
        (FIELDS | {"epoch": 1.5}, Reject.BAD_FIELD),
        (FIELDS | {"epoch": "0"}, Reject.BAD_FIELD),
        (FIELDS | {"epoch": 1 << 63}, Reject.BAD_FIELD),
        (V2 | {"timestamp": None}, Reject.BAD_TIME),
        (V2 | {"timestamp": "now"}, Reject.BAD_TIME),
        (V2 | {"timestamp": True}, Reject.BAD_TIME),
        (V2 | {"timestamp": -1}, Reject.BAD_TIME),
        (V2 | {"timestamp": 10**400}, Reject.BAD_TIME),
        (json.dumps(V2).replace("1699999000", "1e999").encode(), Reject.BAD_TIME),
        (FIELDS | {"event_time": "yesterday"}, Reject.BAD_TIME),
        (FIELDS | {"event_time": 17}, Reject.BAD_TIME),
        (FIELDS | {"event_time": "9999-12-31T23:59:59Z"}, Reject.BAD_TIME),
        (FIELDS | {"event": "recover", "transition": 1, "previous": "timeout"}, Reject.IMPOSSIBLE),
        (FIELDS | {"event": "recover", "previous": None}, Reject.IMPOSSIBLE),
        (FIELDS | {"event": "new", "previous": "up"}, Reject.IMPOSSIBLE),
        (FIELDS | {"previous": ["up"]}, Reject.IMPOSSIBLE),
        (V2 | {"timestamp": 1_700_000_000 + 3 * 3600}, Reject.CLOCK_AHEAD),
        ({"event": "observer_alive", "replicator": 7}, Reject.BAD_FIELD),
        ({"event": "observer_alive", "replicator": "EAST", "watermark": "x"}, Reject.BAD_TIME),
    ),
)
def test_invalid_advisory_is_rejected_with_its_reason(payload: object, reason: Reject) -> None:
    message = read(payload)
    assert isinstance(message, Rejected), message
    assert message.reason is reason


def test_clock_ahead_is_only_a_warning_on_numbered_advisories() -> None:
    assert advisory(FIELDS | {"event_time": "2023-11-15T01:00:00Z"}).warning is Reject.CLOCK_AHEAD
    assert advisory(FIELDS | {"event_time": "2023-11-14T22:40:00Z"}).warning is None
    # A message that waited for a connection may be hours old.
    assert advisory(FIELDS | {"event_time": "2023-11-13T00:00:00Z"}).warning is None


def test_recover_without_a_received_new_is_valid() -> None:
    assert advisory(FIELDS | {"event": "recover", "transition": 3, "previous": "timeout"}).warning is None


def test_heartbeat_is_read_as_an_observation_of_a_site() -> None:
    def body(watermark_ns: int | None, next_within_ns: int | None) -> bytes:
        return observer_alive(
            replicator="EAST",
            name="london",
            stream="NODES",
            ts_ns=NOW_NS,
            watermark_ns=watermark_ns,
            position=41,
            lag_messages=2,
            lag_ns=0,
            nodes=7,
            next_within_ns=next_within_ns,
            epoch_ns=6,
        )

    site = ("EAST", "london", "NODES")
    latest_ns = NOW_NS + CLOCK_TOLERANCE_NS
    assert read(body(latest_ns + 1, None)) == Rejected(Reject.CLOCK_AHEAD, "watermark")
    assert read(body(latest_ns, None)) == Observation(*site, latest_ns, 41, 2, 7, None)
    assert read(body(5, SECOND_NS)) == Observation(*site, 5, 41, 2, 7, SECOND_NS)
    assert read(body(None, None)) == Observation(*site, None, 41, 2, 7, None)
    assert json.loads(body(None, None))["epoch"] == 6


@given(st.binary() | st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists))
def test_read_message_never_raises(content: object) -> None:
    payload = (
        content if isinstance(content, bytes) else json.dumps(FIELDS | {"value": content, "seen": content}).encode()
    )
    read_message(payload, NOW_NS)


# ---------------------------------------------------------------------------------------------------------- the fold

times = st.integers(1, 6)
advisories = st.builds(
    lambda epoch, transition, at, event_code, node, name, seen, origin: Advisory(
        "EAST",
        name,
        "S",
        node,
        epoch if transition else 0,
        transition,
        at,
        event_code,
        seen,
        "ours" if transition else origin,
        "",
        None,
        None,
        late=False,
        returned=False,
        outage_seconds=None,
    ),
    st.integers(0, 2),
    st.integers(0, 3),
    times,
    st.integers(0, 3),
    st.sampled_from("ab"),
    st.sampled_from(("", "x")),
    st.none() | times,
    st.sampled_from(("v1", "v2")),
)
histories = st.lists(st.tuples(advisories, times), max_size=40)


@given(histories, st.randoms(use_true_random=False), st.data())
def test_fold_ignores_order_repetitions_and_cuts(
    history: list[tuple[Advisory, int]], chance: random.Random, data: st.DataObject
) -> None:
    uncut = fold({}, history)
    repeated = [*history, *(chance.choice(history) for _ in range(data.draw(st.integers(0, 20))) if history)]
    chance.shuffle(repeated)
    folded: dict[Key, Standing] = {}
    while repeated:
        cut = data.draw(st.integers(1, len(repeated)))
        folded, repeated = fold(folded, repeated[:cut]), repeated[cut:]
    assert folded == uncut


@given(histories)
def test_fold_prefers_epoch_then_transition_then_event_time(
    history: list[tuple[Advisory, int]],
) -> None:
    for key, standing in fold({}, history).items():
        of_node = [advisory for advisory, _ in history if key == advisory[:4]]
        numbered = [advisory for advisory in of_node if advisory.transition]
        if numbered:
            assert standing[:2] == max((advisory.epoch_ns, advisory.transition) for advisory in numbered)
        else:
            assert standing[2:4] == max((advisory.event_ns, advisory.event_code) for advisory in of_node)


def test_later_epoch_wins_over_a_higher_transition() -> None:
    retired = advisory(FIELDS | {"event": "expire", "transition": 9, "previous": "timeout"})
    restarted = advisory(FIELDS | {"event": "new", "transition": 1, "previous": None, "epoch": NOW_NS})
    (standing,) = fold({}, [(restarted, 1), (retired, 2)]).values()
    assert STATUS[standing.event_code] == "up"


def test_rank_fields_exist() -> None:
    assert set(RANK) - {"received_ns"} <= set(Advisory._fields)
    assert len(STATUS) == len(REPORTED)


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=6)


def sent(document: dict[str, Any], subject: str, *hops: str) -> Message:
    """Return a stored message that entries (`REPLICATOR/NAME`) have copied."""
    origins = (f"Choria-SR-Source: ADV 1 {hop.replace('/', ' ')} 1700000000000\r\n" for hop in hops)
    headers = f"NATS/1.0\r\n{''.join(origins)}\r\n".encode() if hops else b""
    return Message(1, NOW_NS, subject, headers, json.dumps(document).encode())


HEARTBEAT = {"protocol": "x", "event": "observer_alive", "replicator": "EAST", "name": "paris", "stream": "ADV"}
NODE_EVENT: dict[str, Any] = {
    "protocol": NODE_PROTOCOL,
    "event": "unretired",
    "replicator": "EAST",
    "name": "paris",
    "stream": "NODES",
    "value": "web1",
    "epoch": 1,
    "timestamp": 1_699_999_000,
    "state": {"event": "new", "timestamp": 1_699_999_000, "transition": 3},
}
ABOUT_PARIS = (FIELDS | {"name": "paris"}, HEARTBEAT, NODE_EVENT)
PATHS = (
    SitePath("EAST", "paris", ("paris.>",)),
    SitePath("EAST", "london", ("london.>", "sr_assets.*.*.EAST.london.>"), ("EAST/london", "HUB/region")),
)


@pytest.mark.parametrize("document", ABOUT_PARIS, ids=("advisory", "heartbeat", "node_event"))
@given(subject=st.from_regex(r"(london|paris|adv|paris-2)(\.[a-z]{1,5}){1,3}", fullmatch=True), forged=st.booleans())
def test_site_speaks_through_its_own_subjects_alone(document: dict[str, Any], subject: str, forged: bool) -> None:
    """Another site writes what it likes into the body and the headers, but on its own subjects."""
    paths = SitePaths(PATHS)
    hops = ("EAST/paris",) if forged else ()
    content = paths.read(sent(document, subject, *hops))
    assert (content == Rejected(Reject.FOREIGN_SITE, "name")) == (not subject.startswith("paris."))
    unknown = paths.read(sent(document | {"name": "rome"}, subject, *hops))
    assert unknown == Rejected(Reject.FOREIGN_SITE, "name")


@given(st.lists(st.sampled_from(("EAST/paris", "EAST/london", "HUB/region", "x/y")), max_size=4))
def test_site_speaks_through_the_entries_that_copy_it(hops: list[str]) -> None:
    """A publisher may write the first hops itself, but each copy adds one."""
    content = SitePaths(PATHS).read(sent(FIELDS, "london.adv.web1", *hops))
    assert isinstance(content, Advisory) == (hops == ["EAST/london", "HUB/region"])


@given(NAMES, NAMES, NAMES, st.sampled_from(("", "city.", "a.b.")), st.booleans())
def test_default_subjects_name_their_site(
    replicator: str, name: str, stream: str, prefix: str, of_another: bool
) -> None:
    """Without configured paths, a heartbeat on another site's default subject is rejected; an own one is not."""
    spoken = HEARTBEAT | {"replicator": replicator, "name": name, "stream": stream}
    own = f"{prefix}{observer_subject(None, replicator, f'{name}x' if of_another else name, stream)}"
    content = SitePaths(()).read(sent(spoken, own))
    # The last token of a name may become two: then the subject says nothing.
    if of_another and not name.endswith("."):
        assert content == Rejected(Reject.FOREIGN_SITE, "name")
    elif not of_another:
        assert isinstance(content, Observation)
    # A subject that was rewritten on the way says nothing either.
    assert isinstance(SitePaths(()).read(sent(spoken, "beats.all")), Observation)


SITE_EVENT = {"protocol": SITE_PROTOCOL, "event": "restored", "replicator": "EAST", "name": "paris", "stream": "ADV"}


@given(st.integers(NOW_NS // SECOND_NS - 10**6, 9 * 10**9))
def test_site_event_ahead_of_its_stored_time_is_rejected(seconds: int) -> None:
    """The latest event counts: `restored` of the year 2255 would hide every later outage."""
    content = SitePaths(()).read(sent(SITE_EVENT | {"timestamp": seconds}, "paris.events"))
    if seconds * SECOND_NS > NOW_NS + CLOCK_TOLERANCE_NS:
        assert content == Rejected(Reject.CLOCK_AHEAD, "event_time")
    else:
        assert content == SiteNotice("EAST", "paris", "ADV", "restored", seconds * SECOND_NS)


@given(st.integers(0, 9 * 10**9), st.integers(1, 9 * 10**9))
def test_times_of_a_node_at_the_centre_are_bounded(event: int, seen: int) -> None:
    times = {"timestamp": event, "event_time": None, "seen": seen}
    for document in (FIELDS | times, NODE_EVENT | {"state": NODE_EVENT["state"] | times}):
        state = SitePaths(()).told_state(sent(document, "paris.adv"))
        assert state is not None
        early = event * SECOND_NS <= NOW_NS + CLOCK_TOLERANCE_NS
        assert state.event_ns == (event * SECOND_NS if early else NOW_NS)
        assert state.warning is (None if early else Reject.CLOCK_AHEAD)
        assert state.seen_ns == (seen * SECOND_NS if seen * SECOND_NS <= NOW_NS + CLOCK_TOLERANCE_NS else NOW_NS)


@given(st.integers(0, 2**80), st.integers(1, 2**80), st.integers(0, 10**15))
def test_numbers_of_an_advisory_are_bounded(epoch: int, transition: int, within: int) -> None:
    """No number outranks all later ones for ever, or keeps a dead site from being blind."""
    for document in (FIELDS | {"epoch": epoch, "transition": max(2, transition)}, NODE_EVENT | {"epoch": epoch}):
        content = read(document)
        state = content.state if isinstance(content, NodeNotice) else content
        if isinstance(state, Advisory):
            assert state.epoch_ns <= NOW_NS + CLOCK_TOLERANCE_NS
            assert state.transition < 1 << 31
        else:
            assert isinstance(state, Rejected)
    beat = read(HEARTBEAT | {"next_within_seconds": within})
    assert isinstance(beat, Observation)
    assert beat.next_within_ns is None or beat.next_within_ns <= DAY_NS
