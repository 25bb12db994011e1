"""The configuration of a created target: options copied from the source, and overrides."""

import pytest

from sr_assets.domain.target_stream import TargetOptions, target_config

MINUTE_NS = 60 * 1_000_000_000


def test_target_config_copies_only_the_documented_options() -> None:
    source = {
        "name": "SRC",
        "subjects": ["a.>", "b.*"],
        "storage": "memory",
        "retention": "workqueue",
        "max_msgs": 10,
        "max_bytes": 1000,
        "max_age": 60 * MINUTE_NS,
        "max_msgs_per_subject": 3,
        "max_msg_size": 500,
        "discard": "new",
        "duplicate_window": 5 * MINUTE_NS,
        "num_replicas": 3,
        "no_ack": True,
        "sources": [{"name": "OTHER"}],
        "placement": {"tags": ["x"]},
        "deny_delete": True,
        "metadata": {"owner": "x"},
    }
    assert target_config("COPY", ["copy.>", "copy.b.*"], source) == {
        "name": "COPY",
        "subjects": ["copy.>"],
        "storage": "memory",
        "retention": "limits",
        "max_msgs": 10,
        "max_bytes": 1000,
        "max_age": 60 * MINUTE_NS,
        "max_msgs_per_subject": 3,
        "discard": "new",
        "duplicate_window": 5 * MINUTE_NS,
        "num_replicas": 3,
        "allow_direct": True,
    }


@pytest.mark.parametrize(
    ("patterns", "subjects"),
    (
        (["a.b"], ["a.b"]),
        (["a.>", "a.b", "c.*"], ["a.>", "c.*"]),
        (["a.b", "a.b"], ["a.b"]),
        (["a.*", "a.>"], ["a.>"]),
    ),
)
def test_overlapping_subjects_are_reduced_to_the_widest(patterns: list[str], subjects: list[str]) -> None:
    assert target_config("COPY", patterns, {})["subjects"] == subjects


@pytest.mark.parametrize(
    ("window_ns", "max_age_ns", "expected_ns"),
    (
        (0, 0, 2 * MINUTE_NS),
        (MINUTE_NS, 0, 2 * MINUTE_NS),
        (9 * MINUTE_NS, 0, 9 * MINUTE_NS),
        (0, MINUTE_NS, MINUTE_NS),
    ),
)
def test_duplicate_window_is_two_minutes_unless_max_age_is_less(
    window_ns: int, max_age_ns: int, expected_ns: int
) -> None:
    source = {"duplicate_window": window_ns, "max_age": max_age_ns}
    assert target_config("COPY", ["a"], source)["duplicate_window"] == expected_ns


def test_missing_source_options_get_defaults() -> None:
    config = target_config("COPY", ["a"], {})
    assert (config["storage"], config["num_replicas"]) == ("file", 1)


def options(**settings: object) -> TargetOptions:
    return TargetOptions(tuple(settings.items()))


def test_target_options_override_the_source() -> None:
    changes = {
        "storage": "memory",
        "num_replicas": 3,
        "max_age": MINUTE_NS,
        "max_bytes": -1,
        "max_msgs": 5,
        "max_msgs_per_subject": 2,
        "retention": "interest",
        "subjects": ["copies.>"],
        "placement": {"cluster": "east", "tags": ["ssd"]},
    }
    source = {"storage": "file", "max_age": 60 * MINUTE_NS, "max_msgs": 7, "max_bytes": 9}
    config = target_config("COPY", ["a"], source, options(**changes))
    assert config == {**target_config("COPY", ["a"], {}), **changes, "duplicate_window": MINUTE_NS}
    assert options(**changes).drift(config) == []


@pytest.mark.parametrize(
    ("error", "expected"),
    (
        ("duplicates window can not be larger then max age", "max_age 60s, duplicate_window 120s"),
        ("replicas > 1 not supported in non-clustered mode", "replicas 3"),
        ("something else", "max_age 60s, duplicate_window 120s, replicas 3"),
    ),
)
def test_refused_setting_is_found_by_the_words_of_the_server(error: str, expected: str) -> None:
    wanted = options(max_age=MINUTE_NS, duplicate_window=2 * MINUTE_NS, num_replicas=3)
    assert wanted.refused(error) == expected


def test_configured_duplicate_window_replaces_the_derived_one() -> None:
    changes = options(max_age=MINUTE_NS, duplicate_window=MINUTE_NS // 2)
    assert target_config("COPY", ["a"], {}, changes)["duplicate_window"] == MINUTE_NS // 2


def test_drift_names_options_that_differ() -> None:
    config = {
        "storage": "file",
        "num_replicas": 3,
        "max_age": 0,
        "max_msgs": 9,
        "duplicate_window": MINUTE_NS,
        "subjects": ["b", "a"],
        "placement": {"tags": ["hdd"], "cluster": "east"},
    }
    wanted = options(
        storage="memory",
        num_replicas=1,
        max_age=MINUTE_NS,
        max_msgs=-1,
        max_bytes=-1,
        duplicate_window=2 * MINUTE_NS,
        subjects=("a", "b"),
        deny_purge=True,
        deny_delete=False,
        placement={"tags": ["ssd"]},
    )
    assert wanted.drift(config) == [
        "storage file, wanted memory",
        "replicas 3, wanted 1",
        "max_age unlimited, wanted 60s",
        "max_msgs 9, wanted unlimited",
        "duplicate_window 60s, wanted 120s",
        "deny_purge False, wanted True",
        "placement {'tags': ['hdd']}, wanted {'tags': ['ssd']}",
    ]
