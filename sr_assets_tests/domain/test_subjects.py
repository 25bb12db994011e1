"""Subjects: wildcards against a brute-force match, rewriting, and safe encoding of names."""

import itertools
import re
from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sr_assets.domain.subjects import (
    advisory_subject,
    covers,
    is_valid_filter,
    matcher,
    overlaps,
    target_subject,
    token,
)

SUBJECTS = [".".join(parts) for size in (1, 2, 3, 4) for parts in itertools.product("ab", repeat=size)]
PATTERNS = [
    ".".join([*head, last]) for size in (0, 1, 2) for head in itertools.product("ab*", repeat=size) for last in "ab*>"
]
PAIRS = list(itertools.product(PATTERNS, repeat=2))
LITERALS = st.lists(st.text("ab-_1", min_size=1, max_size=4), min_size=1, max_size=5).map(".".join)


@cache
def matching_subjects(pattern: str) -> set[str]:
    meaning = {"*": "[ab]", ">": r"[ab](\.[ab])*"}
    expression = re.compile(r"\.".join(meaning.get(part, part) for part in pattern.split(".")))
    return {subject for subject in SUBJECTS if expression.fullmatch(subject)}


def test_pattern_covers_the_subjects_of_its_wildcards() -> None:
    for pattern in PATTERNS:
        assert {subject for subject in SUBJECTS if covers(pattern, subject)} == matching_subjects(pattern), pattern


def test_matcher_accepts_subjects_that_any_pattern_covers() -> None:
    subjects = [*SUBJECTS, "", ".", "a.", "a..b", "a.b\n", "ab", "a+b"]
    for patterns in [(), *((pattern,) for pattern in [*PATTERNS, "a+b", "a.b|b"]), *PAIRS]:
        matches = matcher(patterns)
        for subject in subjects:
            assert bool(matches(subject)) == any(covers(pattern, subject) for pattern in patterns), (patterns, subject)


def test_patterns_overlap_if_they_share_a_subject() -> None:
    for left, right in PAIRS:
        assert overlaps(left, right) == bool(matching_subjects(left) & matching_subjects(right)), (left, right)


def test_pattern_covers_another_if_it_covers_its_subjects() -> None:
    for wide, narrow in PAIRS:
        # Two letters cannot distinguish `*` from both letters, so replace wildcards with a third one too.
        third = narrow.replace("*", "c")
        probes = matching_subjects(narrow) | {third.replace(">", "c"), third.replace(">", "c.c")}
        assert covers(wide, narrow) == all(covers(wide, probe) for probe in probes), (wide, narrow)


@pytest.mark.parametrize("pattern", ("a", "a.b", ">", "*", "a.*.>", "a*b.c", "é.ü", "$JS.API"))
def test_filter_accepted_by_a_server_is_valid(pattern: str) -> None:
    assert is_valid_filter(pattern)


@pytest.mark.parametrize(
    "pattern", ("", ".", "a.", ".a", "a..b", ">.a", "a.>.b", "a b", "a\tb", "a\r\nPUB x 0", "\x00")
)
def test_filter_refused_by_a_server_is_invalid(pattern: str) -> None:
    assert not is_valid_filter(pattern)


@pytest.mark.parametrize(("number", "expected"), ((1, "a"), (3, "c"), (4, None), (0, None), (-2, None), (-1, "a.b.c")))
def test_token_counts_from_one_and_minus_one_is_the_subject(number: int, expected: str | None) -> None:
    assert token("a.b.c", number) == expected


@pytest.mark.parametrize(
    ("subject", "prefix", "remove", "expected"),
    (
        ("a.b", "", "", "a.b"),
        ("a.b", "site", "", "site.a.b"),
        ("choria.stream.input.registration.web1", "", "stream.input.", "choria.registration.web1"),
        ("choria.stream.input.registration.web1", "", ".stream.input", "choria.registration.web1"),
        ("choria.stream.input.web1", "us", "stream.input", "us.choria.web1"),
        ("a.x.b.x.c", "", "x", "a.b.c"),
        ("a.x.x.x.c", "", "x", "a.c"),
        ("a.b", "x", "x.", "a.b"),
        ("a.stream.>", "p", "stream.", "p.a.>"),
    ),
)
def test_target_subject_adds_the_prefix_and_removes_text(subject: str, prefix: str, remove: str, expected: str) -> None:
    assert target_subject(subject, prefix, remove) == expected


@given(LITERALS, st.one_of(st.just(""), LITERALS), st.one_of(st.just(""), st.text("ab.", max_size=3)))
def test_target_subject_has_no_empty_token_inside(subject: str, prefix: str, remove: str) -> None:
    result = target_subject(subject, prefix, remove)
    assert ".." not in result
    whole = f"{prefix}.{subject}" if prefix else subject
    if not remove or remove not in whole:
        assert result == whole
    assume(result.strip(".") == result and result)
    assert is_valid_filter(result)


@pytest.mark.parametrize(
    ("sender", "expected"),
    (
        ("web1.example.net", "adv.timeout.web1.example.net"),
        ("a b", "adv.timeout.a%20b"),
        ("*", "adv.timeout.%2A"),
        (">", "adv.timeout.%3E"),
        ("a..b", "adv.timeout.a.%.b"),
        (".", "adv.timeout.%.%"),
        ("x\r\nPUB y 0\r\n", "adv.timeout.x%0D%0APUB%20y%200%0D%0A"),
        ("%s%v", "adv.timeout.%25s%25v"),
        ("é", "adv.timeout.%C3%A9"),
        ("a_b-C9", "adv.timeout.a_b-C9"),
    ),
)
def test_sender_name_is_encoded_token_by_token(sender: str, expected: str) -> None:
    assert advisory_subject("adv.%s.%v", "timeout", sender) == expected


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1))
def test_any_sender_name_gives_a_valid_subject(sender: str) -> None:
    subject = advisory_subject("adv.%v.%s", "new", sender)
    assert is_valid_filter(subject)
    assert subject.isascii()
    assert len(subject.split(".")) == len(sender.split(".")) + 2
    assert not {"*", ">"} & set(subject)
