"""Registration messages: every wrapper and content, oversized content, and other payloads."""

import base64
import gzip
import json
import random
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
    METADATA_BYTES,
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
    text, metadata, _ = decode_payload(payload)
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
        {"content": '{"a": 1.50}'},
    ),
)
def test_content_of_every_wrapper_is_returned_unchanged(protocol: str, kind: str, content: dict[str, object]) -> None:
    payload = wrapped({"protocol": kind, **content}, protocol)
    assert decode_payload(payload) == (payload.decode(), '{"a": 1.50}', False)


def test_content_may_be_inline_and_a_file_may_be_plain_text() -> None:
    for registration, metadata in (
        ({"protocol": INVENTORY_PROTOCOL, "content": {"a": ["é", 10**30]}}, '{"a":["é",1' + "0" * 30 + "]}"),
        ({"protocol": FILE_PROTOCOL, "content": "a: 1\n"}, '"a: 1\\n"'),
        ({"protocol": INVENTORY_PROTOCOL, "content": "a: 1\n"}, None),
    ):
        payload = wrapped(registration)
        assert decode_payload(payload) == (payload.decode(), metadata, metadata is None)


@pytest.mark.parametrize(
    "registration",
    (
        {"protocol": INVENTORY_PROTOCOL, "zcontent": "not base64!"},
        {"protocol": INVENTORY_PROTOCOL, "zcontent": as_base64(b"not packed")},
        {"protocol": INVENTORY_PROTOCOL, "zcontent": as_base64(gzip.compress(b"{}")[:-3])},
        {"protocol": INVENTORY_PROTOCOL, "zcontent": as_base64(gzip.compress(b"\xff"))},
        {"protocol": INVENTORY_PROTOCOL, "content": '{"a":NaN}'},
        {"protocol": INVENTORY_PROTOCOL, "content": '{"a":1e999}'},
        {"protocol": INVENTORY_PROTOCOL, "content": '{"a":"\\ud800"}'},
        {"protocol": INVENTORY_PROTOCOL, "zcontent": as_base64(gzip.compress(b"[1,") + gzip.compress(b"2]"))},
        f'{{"protocol":"{INVENTORY_PROTOCOL}","content":{"[" * 1_020}{"]" * 1_020}}}',
    ),
)
def test_unreadable_content_has_no_metadata_and_is_refused(registration: object) -> None:
    payload = wrapped(registration)
    assert decode_payload(payload) == (payload.decode(), None, True)


@pytest.mark.parametrize(
    "payload",
    (
        b"",
        b"\xff",
        b"[]",
        b'{"sender":"web1"}',
        wrapped({"protocol": INVENTORY_PROTOCOL, "content": "{}"}, "choria:adapters:other:output:1"),
        wrapped({"protocol": "choria:registration:other:1", "content": "{}"}),
        wrapped({"protocol": INVENTORY_PROTOCOL}),
        wrapped("not json"),
        wrapped("[]"),
        wrapped("[" * 100_000),
        wrapped({"protocol": FILE_PROTOCOL, "content": "\ud800"}),
        json.dumps({"protocol": "choria:adapters:jetstream:output:1", "data": {"a": 1}}).encode(),
        json.dumps({"protocol": ["choria:adapters:jetstream:output:1"]}).encode(),
    ),
)
def test_other_payloads_have_no_metadata(payload: bytes) -> None:
    assert decode_payload(payload)[1:] == (None, False)


@pytest.mark.parametrize(
    "payload",
    (b"", b"\xff", b'{"a":NaN}', b'{"a":1e999}', b'["\\ud800"]', b"{} rest", b"\xef\xbb\xbf{}", b"[" * 100_000),
)
def test_payload_that_is_not_strict_json_has_no_text(payload: bytes) -> None:
    assert decode_payload(payload) == (None, None, False)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])) | JSON_OBJECTS)
def test_json_that_is_not_a_registration_is_text_only(value: object) -> None:
    text = json.dumps(value)
    assert decode_payload(text.encode()) == (text, None, False)


def test_oversized_compressed_content_is_refused() -> None:
    exact = random.Random(1).randbytes(METADATA_BYTES // 2).hex().encode()
    assert inflate(gzip.compress(exact, 1), len(exact)) == exact
    assert inflate(gzip.compress(exact + b" ", 1), len(exact)) is None
    for content, limit, refused in ((exact, METADATA_BYTES, True), (exact, 2 * METADATA_BYTES, False)):
        payload = wrapped({"protocol": FILE_PROTOCOL, "zcontent": as_base64(gzip.compress(content, 1))})
        assert decode_payload(payload, limit) == (payload.decode(), None if refused else f'"{exact.decode()}"', refused)


def test_bytes_after_compressed_content_are_refused() -> None:
    for more in (b"rubbish", gzip.compress(b"{}"), gzip.compress(b"")):
        assert inflate(gzip.compress(b"{}") + more, 100) is None
    assert inflate(b"", 100) is None


@st.composite
def bombs(draw: st.DrawFn) -> bytes:
    """A registration whose content grows as much as its kind, encoding and letters permit."""
    text = draw(st.sampled_from(["\0", "\x7f", "a", "\n", "é", "😀", " ", "0", "[]", '"'])) * draw(
        st.integers(0, 1 << 19)
    )
    content = draw(st.sampled_from([text, json.dumps(text), json.dumps([text]), json.dumps({"a": text})]))
    packed = content.encode()
    for _ in range(draw(st.integers(1, 2))):
        packed = gzip.compress(packed) if draw(st.booleans()) else zlib.compress(packed)
    members = packed * draw(st.sampled_from([1, 1, 1, 2, 1_000])) if len(packed) < 2_000 else packed
    kind = draw(st.sampled_from([FILE_PROTOCOL, INVENTORY_PROTOCOL]))
    bodies = [
        {"zcontent": as_base64(members)},
        {"content": content},
        {"content": [text]},
        {"content": {"a": {text: 1}}},
    ]
    return wrapped({"protocol": kind, **draw(st.sampled_from(bodies))})


@given(bombs(), st.integers(1, 1 << 22))
def test_metadata_is_bounded_by_its_message_and_the_limit(payload: bytes, limit: int) -> None:
    text, metadata, refused = decode_payload(payload, limit)
    assert text == payload.decode()
    assert refused is (metadata is None)
    if metadata is not None:
        assert len(metadata.encode()) <= min(limit, 200 * len(payload))


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
    assert slow.inflate(packed, 1 << 20) == inflate(packed, 1 << 20)
    payload = wrapped({"protocol": FILE_PROTOCOL, "zcontent": as_base64(packed)})
    assert slow.decode_payload(payload) == decode_payload(payload)


@given(st.text() | st.text("Aa+/= \n-_") | st.binary().map(as_base64))
def test_slow_modules_decode_the_same_base64(slow: ModuleType, text: str) -> None:
    payload = wrapped(json.dumps({"protocol": FILE_PROTOCOL, "zcontent": text}))
    assert slow.decode_payload(payload) == decode_payload(payload)
