"""The subjects that a stream stores, after all transforms."""

from typing import Any

import pytest

from sr_assets.domain.subjects import stored_patterns

UPSTREAM = {"A": ("a.>",), "B": ("b.*", "c")}


@pytest.mark.parametrize(
    ("config", "expected"),
    (
        ({"subjects": ["a.>", "b"]}, ("a.>", "b")),
        ({"subjects": ["a.>"], "subject_transform": {"src": "a.>", "dest": "x.>"}}, ("x.>",)),
        ({"subjects": ["a.>"], "subject_transform": {"src": "a.*", "dest": "x.$1"}}, ("a.>", "x.*")),
        ({"subjects": ["a.>", "b"], "subject_transform": {"src": "c", "dest": "x"}}, ("a.>", "b")),
        (
            {"subjects": ["a.*"], "subject_transform": {"src": "a.*", "dest": "{{partition(3,1)}}.{{wildcard(1)}}"}},
            ("*.*",),
        ),
        ({"subjects": ["a.*"], "subject_transform": {"src": "a.*", "dest": "n{{left(1,2)}}.x"}}, ("*.x",)),
        ({"subjects": ["a.*"], "subject_transform": {"src": "a.*", "dest": "x.{{split(1,-)}}.y"}}, ("x.>",)),
        ({"subjects": ["a.*"], "subject_transform": {"src": "", "dest": "x.>"}}, ("x.>",)),
        ({"sources": [{"name": "A"}, {"name": "B"}]}, ("a.>", "b.*", "c")),
        ({"subjects": ["a.>"], "sources": [{"name": "A"}]}, ("a.>",)),
        ({"sources": [{"name": "A", "filter_subject": "a.b"}]}, ("a.b",)),
        ({"sources": [{"name": "A", "subject_transforms": [{"src": "a.>", "dest": "x.>"}]}]}, ("x.>",)),
        ({"sources": [{"name": "A", "subject_transforms": [{"src": "a.b", "dest": ""}]}]}, ("a.b",)),
        ({"mirror": {"name": "B"}}, ("b.*", "c")),
        ({"mirror": {"name": "B"}, "subject_transform": {"src": "c", "dest": "d"}}, ("b.*", "d")),
        ({"mirror": {"name": "UNKNOWN"}}, None),
        ({"subjects": ["a"], "sources": [{"name": "UNKNOWN"}]}, None),
        ({}, ()),
    ),
)
def test_stored_patterns_follow_origins_and_transforms(
    config: dict[str, Any], expected: tuple[str, ...] | None
) -> None:
    assert stored_patterns(config, lambda origin: UPSTREAM.get(origin["name"])) == expected
