"""Registration messages: every wrapper and content, oversized content, and other payloads."""

import base64
import gzip
import json
import sys
import zlib
from importlib.util import find_spec, module_from_spec
from types import ModuleType

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.domain.registration import (
    ADAPTER_PROTOCOLS,
    FILE_PROTOCOL,
    INVENTORY_PROTOCOL,
    MAX_INFLATED_BYTES,
    decode_payload,
    inflate,
    is_json,
)

JSON_OBJECTS = st.dictionaries(
    st.text(alphabet=st.characters(exclude_categories=["Cs"])), st.integers() | st.text("aé\n")
)


def as_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def wrapped(registration: object, protocol: str = "choria:adapters:choria_streams:output:1") -> bytes:
    data = registration if isinstance(registration, str) else json.dumps(registration)
    document = {"protocol": protocol, "data": data, "sender": "web1", "time": "2026-03-15T17:20:24Z", "requestid": "5c"}
    return json.dumps(document).encode()


@given(JSON_OBJECTS)
def test_inventory_is_unwrapped(inventory: dict[str, object]) -> None:
    content = gzip.compress(json.dumps(inventory).encode())
    payload = wrapped({"protocol": INVENTORY_PROTOCOL, "zcontent": as_base64(content)})
    text, metadata = decode_payload(payload)
    assert text == payload.decode()
    assert metadata is not None
    assert json.loads(metadata) == inventory


@pytest.mark.parametrize("protocol", sorted(ADAPTER_PROTOCOLS))
@pytest.mark.parametrize("kind", (INVENTORY_PROTOCOL, FILE_PROTOCOL))
@pytest.mark.parametrize(
    "content",
    (
        {"zcontent": as_base64(gzip.compress(b'{"a": 1.50}'))},
        {"zcontent": as_base64(zlib.compress(b'{"a": 1.50}'))},
        {"zcontent": as_base64(gzip.compress(b'{"a": ') + gzip.compress(b"1.50}"))},
        {"content": '{"a": 1.50}'},
    ),
)
def test_content_of_every_wrapper_is_returned_unchanged(protocol: str, kind: str, content: dict[str, object]) -> None:
    payload = wrapped({"protocol": kind, **content}, protocol)
    assert decode_payload(payload) == (payload.decode(), '{"a": 1.50}')


def test_content_may_be_inline_and_a_file_may_be_plain_text() -> None:
    for registration, metadata in (
        ({"protocol": INVENTORY_PROTOCOL, "content": {"a": ["é", 10**30]}}, '{"a":["é",1' + "0" * 30 + "]}"),
        ({"protocol": FILE_PROTOCOL, "content": "a: 1\n"}, '"a: 1\\n"'),
        ({"protocol": INVENTORY_PROTOCOL, "content": "a: 1\n"}, None),
    ):
        payload = wrapped(registration)
        assert decode_payload(payload) == (payload.decode(), metadata)


@pytest.mark.parametrize(
    "registration",
    (
        {"protocol": INVENTORY_PROTOCOL},
        {"protocol": INVENTORY_PROTOCOL, "zcontent": "not base64!"},
        {"protocol": INVENTORY_PROTOCOL, "zcontent": as_base64(b"not packed")},
        {"protocol": INVENTORY_PROTOCOL, "zcontent": as_base64(gzip.compress(b"{}")[:-3])},
        {"protocol": INVENTORY_PROTOCOL, "zcontent": as_base64(gzip.compress(b"\xff"))},
        {"protocol": INVENTORY_PROTOCOL, "content": '{"a":NaN}'},
        {"protocol": INVENTORY_PROTOCOL, "content": '{"a":1e999}'},
        {"protocol": INVENTORY_PROTOCOL, "content": '{"a":"\\ud800"}'},
        f'{{"protocol":"{INVENTORY_PROTOCOL}","content":{"[" * 1_020}{"]" * 1_020}}}',
    ),
)
def test_unreadable_content_has_no_metadata(registration: object) -> None:
    payload = wrapped(registration)
    assert decode_payload(payload) == (payload.decode(), None)


@pytest.mark.parametrize(
    "payload",
    (
        b"",
        b"\xff",
        b"[]",
        b'{"sender":"web1"}',
        wrapped({"protocol": INVENTORY_PROTOCOL, "content": "{}"}, "choria:adapters:other:output:1"),
        wrapped({"protocol": "choria:registration:other:1", "content": "{}"}),
        wrapped("not json"),
        wrapped("[]"),
        wrapped("[" * 100_000),
        wrapped({"protocol": FILE_PROTOCOL, "content": "\ud800"}),
        json.dumps({"protocol": "choria:adapters:jetstream:output:1", "data": {"a": 1}}).encode(),
        json.dumps({"protocol": ["choria:adapters:jetstream:output:1"]}).encode(),
    ),
)
def test_other_payloads_have_no_metadata(payload: bytes) -> None:
    assert decode_payload(payload)[1] is None


@pytest.mark.parametrize(
    "payload",
    (b"", b"\xff", b'{"a":NaN}', b'{"a":1e999}', b'["\\ud800"]', b"{} rest", b"\xef\xbb\xbf{}", b"[" * 100_000),
)
def test_payload_that_is_not_strict_json_has_no_text(payload: bytes) -> None:
    assert decode_payload(payload) == (None, None)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])) | JSON_OBJECTS)
def test_json_that_is_not_a_registration_is_text_only(value: object) -> None:
    text = json.dumps(value)
    assert decode_payload(text.encode()) == (text, None)


def test_oversized_compressed_content_is_refused() -> None:
    exact = b" " * (MAX_INFLATED_BYTES - 2) + b"{}"
    assert inflate(gzip.compress(exact, 1)) == exact
    assert inflate(gzip.compress(exact + b" ", 1)) is None
    assert inflate(gzip.compress(exact, 1) + gzip.compress(b" ")) is None
    assert inflate(zlib.compress(b" " * 8 * MAX_INFLATED_BYTES, 9)) is None
    bomb = wrapped({"protocol": FILE_PROTOCOL, "zcontent": as_base64(gzip.compress(exact + b" "))})
    assert decode_payload(bomb) == (bomb.decode(), None)
    nulls = wrapped(
        {"protocol": FILE_PROTOCOL, "zcontent": as_base64(gzip.compress(b"\0" * (MAX_INFLATED_BYTES // 4)))}
    )
    assert decode_payload(nulls)[1] is None, "each becomes six letters"


def test_trailing_bytes_after_compressed_content_are_refused() -> None:
    assert inflate(gzip.compress(b"{}") + b"rubbish") is None
    assert inflate(b"") == b""


#: Pieces of JSON and of almost JSON, such as numbers beyond 64 bits and beyond a double.
PIECES = (
    *('{"a":', "}", "[", "]", ",", ":", " ", "\n", '"', '"a"', "true", "null", "NaN", "\ufeff", "\x00", '"\x01"', "é"),
    *("0", "-0", "01", "1.5", "1e400", "1e-400", str(1 << 63), str(1 << 64)),
    *("\\ud800", '"\\ud800"', '"\\ud83d\\ude00"'),
)


@given(st.lists(st.sampled_from(PIECES)).map("".join) | st.builds(json.dumps, JSON_OBJECTS) | st.text())
def test_text_is_json_exactly_if_the_strict_parser_accepts_it(text: str) -> None:
    try:
        orjson.loads(text)
        accepted = True
    except orjson.JSONDecodeError:
        accepted = False
    assert is_json(text) is accepted


@pytest.fixture(scope="module")
def slow() -> ModuleType:
    """The module as an executor without the faster modules imports it."""
    spec = find_spec("sr_assets.domain.registration")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("isal", "pybase64", "simdjson"):
            patch.setitem(sys.modules, name, None)
        spec.loader.exec_module(module)
    return module


@given(
    st.binary()
    | st.binary().map(gzip.compress)
    | st.binary().map(zlib.compress)
    | st.builds(lambda content, cut: gzip.compress(content)[:-cut], st.binary(), st.integers(1, 20))
)
def test_slow_modules_unpack_the_same(slow: ModuleType, packed: bytes) -> None:
    assert slow.zlib is zlib
    assert slow.inflate(packed) == inflate(packed)
    payload = wrapped({"protocol": FILE_PROTOCOL, "zcontent": as_base64(packed)})
    assert slow.decode_payload(payload) == decode_payload(payload)


@given(st.text() | st.text("Aa+/= \n-_") | st.binary().map(as_base64))
def test_slow_modules_decode_the_same_base64(slow: ModuleType, text: str) -> None:
    payload = wrapped(json.dumps({"protocol": FILE_PROTOCOL, "zcontent": text}))
    assert slow.decode_payload(payload) == decode_payload(payload)
