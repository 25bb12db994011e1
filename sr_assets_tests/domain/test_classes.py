"""The class of a message, and rules that cover others."""

import json
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.domain import classes
from sr_assets.domain.classes import Classifier, ClassRule, count_text
from sr_assets.domain.senders import (
    Document,
    HeaderName,
    JsonField,
    SubjectToken,
    inspect,
    inspect_class,
    needs_payload,
)

RULES = (
    ClassRule("web", patterns=("web*", "www?")),
    ClassRule("db", path=("facts", "role"), value="db"),
    ClassRule("vip", header="Kind", value="vip"),
    ClassRule("rest", patterns=("*",)),
)
CLASSIFIER = Classifier(RULES)
SENDER = JsonField("sender")


def header(value: str) -> bytes:
    return f"NATS/1.0\r\nKind: {value}\r\nKind: other\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    (
        ({"sender": "web1", "facts": {"role": "db"}}, header("vip"), "web"),
        ({"sender": "www1"}, b"", "web"),
        ({"sender": "www"}, b"", "rest"),
        ({"sender": "WEB1"}, b"", "rest"),
        ({"sender": "a", "facts": {"role": "db"}}, header("vip"), "db"),
        ({"sender": "a", "facts": {"role": ["db"]}}, header("vip"), "vip"),
        ({"sender": "a", "facts": "db"}, header("VIP"), "rest"),
        ({"sender": 7}, b"", "rest"),
        ({"other": "web1"}, header("vip"), None),
    ),
)
def test_first_matching_rule_is_the_class(body: object, headers: bytes, expected: str | None) -> None:
    payload = json.dumps(body).encode()
    sender, forced, node_class = inspect_class(SENDER, None, CLASSIFIER, "s", headers, payload)
    assert (sender, forced) == inspect(SENDER, None, "s", headers, payload)
    assert node_class == expected


@pytest.mark.parametrize(
    ("value", "text"), ((True, "true"), (False, "false"), (12, "12"), (1.50, "1.5"), ("x", "x"), (None, "null"))
)
def test_values_that_are_no_text_count_as_text(value: object, text: str) -> None:
    classifier = Classifier((ClassRule("a", path=("f",), value=text),))
    payload = json.dumps({"sender": "n", "f": value}).encode()
    assert inspect_class(SENDER, None, classifier, "s", b"", payload)[2] == ("a" if value is not None else None)


@given(st.sampled_from([None, ("force",)]), st.sampled_from([True, False, "true", None]), st.booleans())
def test_class_changes_neither_sender_nor_force_flag(force: tuple[str, ...] | None, flag: object, named: bool) -> None:
    payload = json.dumps({"sender": "a" if named else None, "force": flag}).encode()
    for extractor in (SENDER, SubjectToken(1), HeaderName("Kind")):
        assert inspect_class(extractor, force, CLASSIFIER, "s", b"", payload)[:2] == inspect(
            extractor, force, "s", b"", payload
        )


def test_heartbeat_has_no_sender_and_no_class() -> None:
    headers = b"NATS/1.0\r\nChoria-SR-Subject: x\r\n\r\n"
    assert inspect_class(SENDER, None, CLASSIFIER, "x", headers, b'{"sender": "web1"}') == (None, True, None)


def test_classifier_forgets_names_beyond_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classes, "_MOST_NODES", 100)
    classifier = Classifier((ClassRule("db", ("db*",)),))
    for number in range(1_000):
        named = (f"db{number}", f"web{number}", "db")
        assert [classifier.classify(node, b"", Document(b"")) for node in named] == ["db", None, "db"]
        assert len(classifier._by_node) <= 100


def test_only_classes_by_field_need_the_payload() -> None:
    by_header = Classifier((RULES[0], RULES[2]))
    assert not needs_payload(HeaderName("n"), None, by_header)
    assert needs_payload(HeaderName("n"), None, CLASSIFIER)
    assert needs_payload(SENDER, None, by_header)


def test_changed_rules_keep_the_class_of_a_field_or_header() -> None:
    assert [CLASSIFIER.reclassify("a", before) for before in ("db", "vip", "web", None)] == [
        "db",
        "vip",
        "rest",
        "rest",
    ]
    assert CLASSIFIER.reclassify("web1", "db") == "web"
    assert Classifier(RULES[1:3]).reclassify("a", "gone") is None


def test_counts_list_every_class() -> None:
    assert count_text(RULES, ["web", None, "web"]) == "web 2, db 0, vip 0, rest 0, no class 1; of the 3 newest nodes"


letters = st.text("ab", max_size=4)
globs = st.text("ab*?", min_size=1, max_size=4)


@given(globs, st.lists(globs, min_size=1, max_size=2), st.lists(letters, max_size=20))
def test_covering_pattern_matches_every_node_of_the_other(glob: str, others: list[str], nodes: list[str]) -> None:
    if ClassRule("a", patterns=(glob,)).covers(ClassRule("b", patterns=tuple(others))):
        for node in nodes:
            assert not any(fnmatchcase(node, other) for other in others) or fnmatchcase(node, glob), (
                glob,
                others,
                node,
            )
