"""Sender extraction from JSON fields, headers and subjects; no message content raises."""

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sr_assets.domain.senders import (
    HeaderName,
    JsonField,
    SenderExtractor,
    SubjectToken,
    inspect,
    needs_payload,
    parse_path,
)

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60)


def sender(path: str, payload: str | bytes) -> str | None:
    return JsonField(path).extract("s", b"", payload.encode() if isinstance(payload, str) else payload)


@pytest.mark.parametrize(
    ("path", "payload", "expected"),
    (
        ("sender", '{"sender":"web1"}', "web1"),
        ("sender", ' \r\n\t{"sender" : " web 1 "} \n', " web 1 "),
        ("a.b", '{"a":{"b":"x"}}', "x"),
        (r"a\.b", '{"a.b":"x","a":{"b":"y"}}', "x"),
        (r"a\.b.c", '{"a.b":{"c":"x"}}', "x"),
        ("a.1.b", '{"a":[{},{"b":"x"}]}', "x"),
        ("a.0", '{"a":["x"]}', "x"),
        ("a.1", '{"a":["x"]}', None),
        ("a.-1", '{"a":["x"]}', None),
        ("a.0", '{"a":{"0":"x"}}', "x"),
        ("a.²", '{"a":["x","y","z"]}', None),
        ("a", '{"a":1}', "1"),
        ("a", '{"a":-0}', "-0"),
        ("a", '{"a":1.50}', "1.50"),
        ("a", '{"a":1E+400}', "1E+400"),
        ("a", '{"a":12345678901234567890123}', "12345678901234567890123"),
        ("a", '{"a":' + "9" * 255 + "}", "9" * 255),
        ("a", '{"a":' + "9" * 5000 + "}", None),
        ("a", '{"a":true}', None),
        ("a", '{"a":false}', None),
        ("a", '{"a":null}', None),
        ("a", '{"a":{}}', None),
        ("a", '{"a":[]}', None),
        ("a", '{"a":""}', None),
        ("a", "{}", None),
        ("a.b", '{"a":"x"}', None),
        ("a", '{"a":"x","a":"y"}', "y"),
        ("a", '{"a":"x","a":null}', None),
        ("0", '["x"]', None),
        ("a", '"a"', None),
        ("a", "", None),
        ("a", '{"a":"x"} x', None),
        ("a", '{"a":"x"}{}', None),
        ("a", '{"a":"x","b":NaN}', None),
        ("a", '{"a":"x","b":-Infinity}', None),
        ("a", '\ufeff{"a":"x"}', None),
        ("a", '{"a":"\\ud800"}', None),
        ("a", '{"a":"\\ud83d\\ude00"}', "😀"),
        ("a", b'{"a":"\xed\xa0\x80"}', None),
        ("a", b'{"a":"x","b":"\xff"}', None),
        ("a", '{"a":"x"}'.encode("utf-16"), None),
        ("a", '{"a":"x"}'.encode("utf-32-le"), None),
        ("a", '{"a":"tab\there"}', None),
        ("a", "{'a':'x'}", None),
        ("a", '{"a":"x",}', None),
        ("a", '{"a":01}', None),
        ("a", '{"a":' + "[" * 200_000 + "]" * 200_000 + "}", None),
        ("a", json.dumps({"a": "é" * 127}), "é" * 127),
        ("a", json.dumps({"a": "é" * 128}), None),
        ("é", '{"é":"x"}', "x"),
    ),
)
def test_json_field_yields_the_sender(path: str, payload: str | bytes, expected: str | None) -> None:
    assert sender(path, payload) == expected


@pytest.mark.parametrize(
    ("text", "path"),
    (("a", ("a",)), ("a.b", ("a", "b")), (r"a\.b.c", ("a.b", "c")), (r"a\b", (r"a\b",)), (r"\.", (".",))),
)
def test_path_is_split_at_unescaped_dots(text: str, path: tuple[str, ...]) -> None:
    assert parse_path(text) == path


@pytest.mark.parametrize("text", ("", ".", "a.", ".a", "a..b"))
def test_empty_path_segment_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="empty segment"):
        JsonField(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    (
        ("a.#.b", "array query '#'"),
        ("a.#(b==1).c", "array query '#'"),
        ("a.*", "wildcard '*'"),
        ("na?e", "wildcard '?'"),
        ("@this", "modifier '@'"),
        ("a.@reverse", "modifier '@'"),
        ("a|b", "pipe '|'"),
        ("!true", "literal '!'"),
        ("{a,b}", "multipath '{'"),
        ("[a]", "multipath '['"),
    ),
)
def test_gjson_expression_is_refused_by_name(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{text!r} has the gjson {expected}")):
        JsonField(text)


@pytest.mark.parametrize(
    ("text", "path"), ((r"a\#.\@b", ("a#", "@b")), (r"\*\?\|", ("*?|",)), ("a@b.c!", ("a@b", "c!")))
)
def test_escaped_special_character_is_literal(text: str, path: tuple[str, ...]) -> None:
    assert parse_path(text) == path


@example(["a\\\\", "b"], "v")
@given(st.lists(TEXT, min_size=1, max_size=4), TEXT)
def test_every_key_can_be_reached(keys: list[str], value: str) -> None:
    # In a path, a backslash before a special character escapes it, so no key can have a backslash there or at its end.
    keys = [re.sub(r"\\+(?=[#*?|@!{\[]|$)", "", key) or "k" for key in keys]
    document: object = value
    for key in reversed(keys):
        document = {key: document}
    path = ".".join(re.sub(r"[.#*?|@!{\[]", r"\\\g<0>", key) for key in keys)
    expected = value if len(value.encode()) <= 255 else None
    assert sender(path, json.dumps(document)) == expected


@pytest.mark.parametrize(
    ("lines", "expected"),
    (
        (b"Sender: web1", "web1"),
        (b"Sender:\t web1 \t", "web1"),
        (b"sender: no\r\nSender: first\r\nSender: second", "first"),
        (b"Sender:\r\nSender: second", None),
        (b"Sender: \xff", None),
        (b"Sender: " + b"x" * 256, None),
        (b"Other: web1", None),
    ),
)
def test_first_header_value_yields_the_sender(lines: bytes, expected: str | None) -> None:
    assert HeaderName("Sender").extract("s", b"NATS/1.0\r\n" + lines + b"\r\n\r\n", b"") == expected


@pytest.mark.parametrize(("number", "expected"), ((1, "reg"), (2, "web1"), (3, "net"), (4, None), (-1, "reg.web1.net")))
def test_subject_token_yields_the_sender(number: int, expected: str | None) -> None:
    assert SubjectToken(number).extract("reg.web1.net", b"", b"") == expected


def test_subject_that_is_not_utf8_has_no_sender() -> None:
    assert SubjectToken(1).extract(b"\xff.a".decode(errors="surrogateescape"), b"", b"") is None


def test_extractor_text_is_its_configuration() -> None:
    extractors: list[SenderExtractor] = [JsonField(r"a\.b"), HeaderName("Sender"), SubjectToken(-1)]
    assert [extractor.text for extractor in extractors] == [r"a\.b", "Sender", "-1"]


@pytest.mark.parametrize(
    ("payload", "expected"),
    (
        (b'{"f":true}', True),
        (b'{"f":false}', False),
        (b'{"f":"true"}', False),
        (b'{"f":1}', False),
        (b'{"f":[true]}', False),
        (b'{"f":null}', False),
        (b"{}", False),
        (b"[true]", False),
        (b'{"f":true,"g":NaN}', False),
        (b"\xff", False),
    ),
)
def test_only_json_true_forces_a_copy(payload: bytes, expected: bool) -> None:
    assert inspect(SubjectToken(1), ("f",), "s", b"", payload) == ("s", expected)


@given(
    st.sampled_from([JsonField("a"), HeaderName("A"), SubjectToken(2)]),
    st.sampled_from([None, ("a",), ("f", "0")]),
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from([b'{"a":"x","f":[true]}', b'{"a":true}', b"{", b'{"a":1}']),
    ),
    st.sampled_from([b"", b"NATS/1.0\r\nA: h\r\n\r\n", b"NATS/1.0\r\nA: \xff\r\n\r\n"]),
)
def test_inspect_equals_two_separate_parses(
    extractor: SenderExtractor, force: tuple[str, ...] | None, payload: bytes, headers: bytes
) -> None:
    _, forced = inspect(SubjectToken(1), force, "s.t", headers, payload)
    sender = extractor.extract("s.t", headers, payload)
    assert inspect(extractor, force, "s.t", headers, payload) == (sender, forced and sender is not None)


_VALUES = st.sampled_from(
    [
        '"x"',
        "1",
        "-0",
        "1.50",
        "1e999",
        "9" * 30,
        "true",
        "null",
        '"\\ud800"',
        '"\\ud83d\\ude00"',
        "NaN",
        "01",
        "[",
        "{}",
    ]
)
_DOCUMENTS = st.recursive(
    _VALUES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda values: f"[{', '.join(values)}]"),
        st.lists(st.tuples(st.sampled_from("abc"), inner), max_size=3).map(
            lambda pairs: "{" + ",".join(f'"{key}":{value}' for key, value in pairs) + "}"
        ),
    ),
)


@given(_DOCUMENTS, st.sampled_from(["a", "a.b", "a.0", "b"]))
def test_fast_parser_agrees_with_the_standard_parser(document: str, path: str) -> None:
    assert sender(path, document) == _extract_with_standard_parser(document, path.split("."))


def _extract_with_standard_parser(document: str, path: list[str]) -> str | None:
    def refuse(constant: str) -> object:
        raise ValueError(constant)

    try:
        value = json.loads(document, parse_int=str, parse_float=str, parse_constant=refuse)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    for segment in path:
        if isinstance(value, dict):
            value = value.get(segment)
        elif isinstance(value, list) and segment.isdigit():
            value = value[int(segment)] if int(segment) < len(value) else None
        else:
            return None
    return value if isinstance(value, str) and value != "\ud800" else None


@pytest.mark.parametrize("extractor", (HeaderName("Node"), SubjectToken(2)))
@given(payload=st.binary(max_size=100))
@example(payload=b'{"Node": "b", "force": true}')
def test_unneeded_payload_does_not_change_the_sender(extractor: SenderExtractor, payload: bytes) -> None:
    assert not needs_payload(extractor, None)
    assert inspect(extractor, None, "s.a", b"NATS/1.0\r\nNode: a\r\n\r\n", payload) == ("a", False)
    assert needs_payload(extractor, ("force",))
    assert needs_payload(JsonField("Node"), None)
