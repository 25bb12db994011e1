"""The decision whether a site needs a run: tables of observations and results."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.adapters.state.status_file import StreamStatus
from sr_assets.automation.decisions import Decision, EntryRules, Observed, SourceNow, decide
from sr_assets.settings import SensorSettings

SECOND_NS = 1_000_000_000
NOW_NS = 1_769_860_800 * SECOND_NS
TRACKED = EntryRules(starts_empty=True, deadline_passed="a deadline has passed", pause_stops_reading=False)
PLAIN = replace(TRACKED, pause_stops_reading=True)
FEED = EntryRules(starts_empty=False, deadline_passed="a heartbeat is overdue", pause_stops_reading=False)
SENSOR = SensorSettings()
#: Caught up with a source of the sequences 1 to 9; copy queue and outbox are empty.
STATUS = StreamStatus(created_ns=5, next_sequence=10, seen_messages=9, watermark_ns=NOW_NS)
SOURCE = SourceNow(created_ns=5, first_sequence=1, last_sequence=9, watermark_ns=NOW_NS)
CAUGHT_UP = Observed(STATUS, SOURCE, TRACKED, committed_at_ns=NOW_NS, age_seconds=5.0)


def observed(
    rules: EntryRules = TRACKED,
    source: dict[str, Any] | None = None,
    around: dict[str, Any] | None = None,
    **status: Any,
) -> Observed:
    """Return the observation of a caught-up stream, changed in its status, its source or the other fields."""
    return replace(
        CAUGHT_UP,
        rules=rules,
        status=replace(STATUS, **status),
        source=replace(SOURCE, **(source or {})),
        **(around or {}),
    )


@pytest.mark.parametrize(
    ("seen", "reason"),
    (
        (observed(), None),
        (observed(created_ns=0, next_sequence=0), "first run"),
        (observed(created_ns=0, source={"last_sequence": 0}), "first run"),
        (observed(FEED, created_ns=0, source={"last_sequence": 0}), None),
        (observed(FEED, created_ns=0), "first run"),
        (observed(source={"created_ns": 6}), "the source was recreated"),
        (observed(source={"last_sequence": 8}), "the source ends before the position"),
        (observed(source={"last_sequence": 8}, seen_messages=0), None),
        (observed(source={"last_sequence": 10}), "1 messages behind"),
        (observed(next_sequence=3, source={"first_sequence": 8}), "2 messages behind"),
        (observed(next_sequence=3, source={"first_sequence": 10}), None),
        (observed(next_deadline_ns=NOW_NS - 1), "a deadline has passed"),
        (observed(FEED, next_deadline_ns=NOW_NS - 1), "a heartbeat is overdue"),
        (observed(next_deadline_ns=NOW_NS), None),
        (observed(next_deadline_ns=1, source={"watermark_ns": None}), None),
        (observed(unpublished=2), None),
        (observed(unpublished=2, around={"deliverable": True}), "2 advisories can be delivered"),
        (observed(around={"deliverable": True}), None),
        (observed(queued=3), "3 copies are queued"),
        (observed(queued=3, source={"last_sequence": 12}), "3 messages behind"),
    ),
)
def test_decide_returns_reason_if_there_is_work(seen: Observed, reason: str | None) -> None:
    assert decide(seen, SENSOR) == Decision(reason)


@pytest.mark.parametrize(
    ("behind", "lag_messages", "lag_seconds", "unread_seconds", "reason"),
    (
        (2, 3, 0, None, None),
        (3, 3, 0, None, "3 messages behind"),
        (2, 3, 60, 59.9, None),
        (2, 3, 60, 60.0, "2 messages behind for 60 s"),
        (2, 3, 60, None, None),
        (0, 3, 60, 99.0, None),
    ),
)
def test_decide_tolerates_configured_lag(
    behind: int, lag_messages: int, lag_seconds: int, unread_seconds: float | None, reason: str | None
) -> None:
    sensor = SensorSettings().changed(lag_messages=lag_messages, lag_ns=lag_seconds * SECOND_NS)
    seen = observed(source={"last_sequence": 9 + behind, "unread_seconds": unread_seconds})
    assert decide(seen, sensor).reason == reason


@pytest.mark.parametrize(
    ("lasted", "age_seconds", "waits"),
    (
        (0, 29.0, "1 s"),  # at least a sensor interval
        (0, 30.0, None),
        (100, 40.0, "60 s"),  # as long as the error has lasted
        (100, 100.0, None),
        (9_000, 299.0, "1 s"),  # at most five minutes
        (9_000, 300.0, None),
        (100, None, None),  # unknown age: retry
    ),
)
@pytest.mark.parametrize("step", ("read", "copy", "announce"))
def test_decide_delays_retry_as_long_as_error_lasted(
    step: str, lasted: int, age_seconds: float | None, waits: str | None
) -> None:
    since_ns = NOW_NS - lasted * SECOND_NS
    statuses: dict[str, dict[str, Any]] = {
        "read": {"last_error": "no", "last_error_since_ns": since_ns, "next_sequence": 8},
        "copy": {"copy_error": "no", "copy_error_since_ns": since_ns, "queued": 1},
        "announce": {"refused_since_ns": since_ns, "unpublished": 3},
    }
    decision = decide(observed(around={"age_seconds": age_seconds, "deliverable": True}, **statuses[step]), SENSOR)
    if waits is None:
        assert decision.reason is not None
    else:
        error = "3 advisories were refused" if step == "announce" else "no"
        assert decision == Decision(None, f"{error} (retry in {waits})")


def test_copy_error_does_not_delay_reading() -> None:
    failing: dict[str, Any] = {"copy_error": "away", "copy_error_since_ns": NOW_NS - SECOND_NS, "queued": 4}
    assert decide(observed(**failing, next_sequence=8), SENSOR).reason == "2 messages behind"
    assert decide(observed(**failing, next_deadline_ns=1), SENSOR).reason == "a deadline has passed"


def test_read_error_does_not_delay_copying() -> None:
    failing: dict[str, Any] = {"last_error": "recreated", "last_error_since_ns": NOW_NS - SECOND_NS, "next_sequence": 8}
    assert decide(observed(**failing, queued=4), SENSOR).reason == "4 copies are queued"


@pytest.mark.parametrize(
    ("rules", "status", "decision"),
    (
        (TRACKED, {"queued": 4}, Decision(None, "copying is paused")),
        (TRACKED, {}, Decision(None)),
        (TRACKED, {"next_sequence": 8, "queued": 4}, Decision("2 messages behind")),
        (TRACKED, {"next_deadline_ns": 1}, Decision("a deadline has passed")),
        (PLAIN, {"next_sequence": 8}, Decision(None, "paused")),
        (PLAIN, {"created_ns": 0}, Decision(None, "paused")),
    ),
)
def test_paused_stream_is_read_only_if_tracked(rules: EntryRules, status: dict[str, Any], decision: Decision) -> None:
    assert decide(observed(rules, around={"paused": True}, paused=True, **status), SENSOR) == decision


@pytest.mark.parametrize("rules", (TRACKED, PLAIN))
@pytest.mark.parametrize("paused", (True, False))
def test_pause_is_a_reason_until_it_is_shown(rules: EntryRules, paused: bool) -> None:
    decision = decide(observed(rules, around={"paused": paused}, paused=not paused), SENSOR)
    assert decision == Decision(f"copying was {'paused' if paused else 'resumed'}")
    assert decide(observed(rules, around={"paused": paused}, paused=paused), SENSOR).reason is None


def test_status_without_queued_key_has_empty_queue() -> None:
    row = {"created_ns": 5, "next_sequence": 10, "lag_messages": 0, "unpublished": 1, "last_error": None}
    assert StreamStatus.from_json(row) == StreamStatus(created_ns=5, next_sequence=10, unpublished=1)
    assert StreamStatus.from_json({}) == StreamStatus()


@given(
    values=st.fixed_dictionaries(
        {},
        optional={field.name: st.integers(0, 20) for field in fields(StreamStatus) if field.type == "int"},
    ),
    last=st.integers(0, 20),
    paused=st.booleans(),
)
def test_decide_returns_reason_or_skip_but_never_both(values: dict[str, Any], last: int, paused: bool) -> None:
    seen = observed(source={"last_sequence": last}, around={"paused": paused}, **values)
    reason, skip = decide(seen, SENSOR)
    assert not (reason and skip)
    # Without an error, pending work is never delayed.
    assert reason is not None or paused or (seen.status.begun and not seen.status.queued)
