"""Advisories: the documented JSON byte for byte, the v1 format, and stable event ids."""

import json
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.domain.advisories import EventIds, encode, encode_v1, event_id, is_late, seconds
from sr_assets.domain.tracking.rules import Event, Status, Transition
from sr_assets_tests.domain.advisory_schemas import V1, V2, problems
from sr_assets_tests.event_schema import unknown_or_wrong

S = 1_000_000_000
T0 = 1_647_351_430 * S
TIMEOUT = Transition(Event.TIMEOUT, T0 + 660 * S, T0, 660 * S, 10_631, Status.UP, 2, returned=False, outage_ns=None)
OUTAGE_NS = 1_300_123_456_789
RECOVER = Transition(
    Event.RECOVER, T0 + OUTAGE_NS, T0, OUTAGE_NS, 10_700, Status.TIMEOUT, 3, returned=False, outage_ns=OUTAGE_NS
)
RETURN = Transition(
    Event.NEW, T0 + OUTAGE_NS, T0 + OUTAGE_NS, 0, 10_700, Status.RETIRED, 4, returned=True, outage_ns=OUTAGE_NS
)


def body(transition: Transition, *, sender: str = "web1.example.net", late: bool = False) -> bytes:
    return encode(
        transition,
        replicator="US-EAST",
        name="east",
        stream="CHORIA_REGISTRATION",
        sender=sender,
        inspect_field="sender",
        epoch_ns=T0 - 51_430 * S,
        late=late,
    )


def test_timeout_is_encoded_exactly_as_documented() -> None:
    key = f'["US-EAST","east","CHORIA_REGISTRATION","web1.example.net","timeout",{T0 + 660 * S}]'
    assert body(TIMEOUT).decode() == (
        '{"protocol":"io.choria.sr.v2.age_advisory","event_id":"' + str(uuid.uuid5(uuid.NAMESPACE_URL, key)) + '",'
        '"inspect_field":"sender","age":660,"seen":1647351430,"replicator":"US-EAST","timestamp":1647352090,'
        '"event":"timeout","value":"web1.example.net","stream":"CHORIA_REGISTRATION","name":"east",'
        '"event_time":"2022-03-15T13:48:10.000000000Z","sequence":10631,"transition":2,"epoch":1647300000000000000,"previous":"up","late":false,'
        '"returned":false,"age_seconds":660.0,"outage_seconds":null}'
    )


@pytest.mark.parametrize(
    ("transition", "expected"),
    (
        (RECOVER, {"age": 1300, "age_seconds": 1300.123, "outage_seconds": 1300.123, "previous": "timeout"}),
        (RETURN, {"age": 0, "age_seconds": 0.0, "outage_seconds": 1300.123, "previous": "retired", "returned": True}),
        (RETURN, {"seen": 1_647_352_730, "timestamp": 1_647_352_730, "event_time": "2022-03-15T13:58:50.123456789Z"}),
        (Transition(Event.NEW, T0, T0, 0, 1, None, 1, returned=False, outage_ns=None), {"previous": None, "age": 0}),
    ),
)
def test_seconds_are_rounded_down_and_fractions_to_milliseconds(
    transition: Transition, expected: dict[str, object]
) -> None:
    document = json.loads(body(transition))
    assert {key: document[key] for key in expected} == expected
    assert isinstance(document["age"], int)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1), st.booleans())
def test_encoded_advisory_keeps_any_sender_name(sender: str, late: bool) -> None:
    document = json.loads(body(TIMEOUT, sender=sender, late=late))
    assert (document["value"], document["late"]) == (sender, late)
    assert document["event_id"] == event_id(
        "US-EAST", "east", "CHORIA_REGISTRATION", sender, "timeout", TIMEOUT.event_ns
    )


@given(st.tuples(st.text(), st.text(), st.text()), st.text(), st.integers())
def test_event_id_is_the_uuid_of_its_names(identity: tuple[str, str, str], sender: str, event_ns: int) -> None:
    name = json.dumps([*identity, sender, "new", event_ns], separators=(",", ":"), ensure_ascii=False)
    assert EventIds(*identity)(sender, Event.NEW, event_ns) == str(uuid.uuid5(uuid.NAMESPACE_URL, name))


def test_event_id_is_stable_and_unique() -> None:
    assert event_id("R", "n", "S", "wéb", Event.NEW, 1) == event_id("R", "n", "S", "wéb", "new", 1)
    assert event_id("R", "n", "S", "web1", "new", 1) == "434b386c-6e18-526c-96ae-9754f473e423"
    others = {
        event_id(*key)
        for key in (("R", "n", "S", "a", "new", 1), ("R", "n", "S", "a", "new", 2), ("R", "n", "S", "a", "expire", 1))
    }
    assert len(others) == 3


def test_is_late_after_more_than_one_interval() -> None:
    assert not is_late(100, 40, 60)
    assert is_late(101, 40, 60)
    assert not is_late(None, 40, 60)


def test_seconds_rounds_to_the_millisecond() -> None:
    assert seconds(1_500_000) == 0.002


@pytest.mark.parametrize("transition", (TIMEOUT, RECOVER, RETURN))
def test_advisories_match_the_published_schemas(transition: Transition) -> None:
    assert problems(body(transition), V2) + unknown_or_wrong(body(transition)) == []
    v1 = encode_v1(transition, name="east", sender="web1", inspect_field="sender")
    assert problems(v1, V1) == (["event: 'new' is not allowed"] if transition is RETURN else [])
    assert bool(unknown_or_wrong(v1)) == (transition is RETURN)
    assert unknown_or_wrong(body(transition).replace(b'"stream":', b'"streams":'))
    assert problems(v1.replace(b'"age":', b'"age":"x","old":'), V1)[0].startswith("age: 'x'")


def test_v1_advisory_is_encoded_exactly_as_by_the_old_replicator() -> None:
    assert encode_v1(TIMEOUT, name="east", sender="web1", inspect_field="sender").decode() == (
        '{"$schema":"https://choria.io/schemas/sr/v1/age_advisory.json","inspect":"sender","value":"web1","age":660,'
        '"seen":1647351430,"replicator":"east","timestamp":1647352090,"event":"timeout"}'
    )
