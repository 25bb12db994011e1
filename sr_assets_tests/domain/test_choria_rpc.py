"""Choria's protocol without signatures: what a daemon answers, and what its adapter stores."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.embedded.choria_rpc import (
    RpcRequest,
    adapter_output,
    agent_names,
    answer,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
    registration_request,
)
from sr_assets.embedded.fleet_plan import FleetPlan

AGENTS = agent_names(3)


def test_request_survives_its_layers() -> None:
    request = RpcRequest("emulated0", b'{"action":"generate"}', "reply.x", "1" * 32, agents=("emulated0",), time=5)
    decoded = decode_request(encode_request(request, "client"))
    assert decoded is not None
    assert (decoded.agent, decoded.body, decoded.reply_to) == (request.agent, request.body, request.reply_to)
    assert (decoded.caller, decoded.agents) == ("choria=client", ("emulated0",))


def test_reply_survives_its_layers() -> None:
    assert decode_reply(encode_reply(RpcRequest("discovery", b"ping"), "web1", b"pong", 7)) == ("web1", b"pong")
    assert decode_reply(b"pong") is None


@pytest.mark.parametrize(
    ("criteria", "concerned"),
    (
        ({}, True),
        ({"identities": ("web1.example.net",)}, True),
        ({"identities": ("/^web/",)}, True),
        ({"identities": ("web2.example.net", "/[/")}, False),
        ({"agents": ("emulated0",)}, True),
        ({"agents": ("puppet",)}, False),
        ({"filtered": True}, False),
    ),
)
def test_filter_selects_nodes(criteria: dict[str, tuple[str, ...]], concerned: bool) -> None:
    assert RpcRequest("discovery", b"ping", **criteria).concerns("web1.example.net", AGENTS) is concerned  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "code"),
    (
        (b'{"action":"generate","data":{"size":25}}', 0),
        (b'{"action":"generate","data":{"size":1001}}', 4),
        (b'{"action":"generate","data":{"size":"many"}}', 4),
        (b'{"action":"stop","data":{}}', 2),
        (b"nonsense", 4),
    ),
)
def test_action_is_answered_with_its_status(body: bytes, code: int) -> None:
    reply = json.loads(answer(RpcRequest("emulated0", body), limit_bytes=1000) or b"")
    assert reply["statuscode"] == code
    assert reply["data"] == ({"message": "0123456789012345678901234"} if code == 0 else {})


def test_discovery_answers_pings_alone() -> None:
    assert answer(RpcRequest("discovery", b"ping"), 0) == b"pong"
    assert answer(RpcRequest("discovery", b"other"), 0) is None


def test_adapter_stores_what_the_plan_publishes() -> None:
    published = next(FleetPlan(3, 10).events(1_773_595_224))
    stored = adapter_output(registration_request(published.payload))
    assert stored is not None
    assert stored[0] == published.sender
    assert json.loads(stored[1]) == json.loads(published.payload)


@pytest.mark.parametrize(
    "payload", (b"", b"{}", b"[]", b'{"protocol":"choria:transport:1","data":"e30=","headers":{}}')
)
def test_adapter_drops_other_messages(payload: bytes) -> None:
    assert adapter_output(payload) is None
    assert decode_request(payload) is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)


def layered(inner: dict[str, object], headers: object) -> bytes:
    """Return a transport message around any inner object."""
    data = base64.b64encode(json.dumps({"message": json.dumps(inner)}).encode()).decode()
    return json.dumps({"protocol": "choria:transport:1", "data": data, "headers": headers}).encode()


ENVELOPES = st.fixed_dictionaries(
    {key: VALUES | st.just("x") for key in ("agent", "requestid", "collective", "callerid", "senderid")},
    optional={"time": VALUES | st.integers(-(10**20), 10**20), "filter": VALUES},
)
INNER = st.fixed_dictionaries({"envelope": ENVELOPES | VALUES, "message": VALUES | st.just("{}")})


@given(
    st.binary(max_size=60)
    | VALUES.map(lambda value: json.dumps(value).encode())
    | st.builds(layered, INNER, st.dictionaries(st.just("reply-to"), VALUES) | VALUES)
    | st.just(b"[" * 100_000)
)
def test_any_message_is_decoded_or_none(payload: bytes) -> None:
    request = decode_request(payload, "emulated0")
    if request is not None:
        request.concerns("web1", AGENTS)
        said = answer(request, 100)
        assert said is None or len(said) < 1_000 + 12 * len(payload)
    reply, stored = decode_reply(payload), adapter_output(payload)
    assert reply is None or isinstance(reply[1], bytes)
    assert stored is None or isinstance(json.loads(stored[1]), dict)
