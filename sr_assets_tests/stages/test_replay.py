"""`replay` on real streams: against the independent fold of `reference`, and against what runs have recorded."""

import json
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyarrow import parquet

from sr_assets.adapters.state.store import SiteState
from sr_assets.definitions import build
from sr_assets_tests.reference import Expected, Rules, Seen, blind_spans, by_field, covered, expect
from sr_assets_tests.rig import SITE, Command, Rig, Sent

SECOND = 10**9
MINUTE = 60 * SECOND
#: A fleet that reports every 10 minutes.
DURATIONS = {"inspect_duration": "2h", "warn_duration": "30m"}
Replay = Callable[..., dict[str, Any]]


def report(*nodes: str, payload_bytes: int = 0) -> list[Sent]:
    return [Sent(json.dumps({"sender": node, "x": "x" * payload_bytes}).encode()) for node in nodes]


def rules_of(stream: str, warn_minutes: float = 30, inspect_minutes: float = 120) -> Rules:
    return Rules(SITE, SITE, stream, int(inspect_minutes * MINUTE), int(warn_minutes * MINUTE), "sender", by_field)


@pytest.fixture
def replay(rig: Rig, command: Command, monkeypatch: pytest.MonkeyPatch) -> Replay:
    """A function that replays a stream by the command, and returns the JSON; `code` is the expected exit code."""
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(rig.home / "replication.yaml"))

    def run(stream: str, *options: str, code: int = 0) -> dict[str, Any]:
        rig.settings()
        ended, output, errors = command("replay", "--stream", stream, "--format", "json", *options)
        assert ended == code, errors
        result: dict[str, Any] = json.loads(output)
        return result

    return run


@pytest.fixture
def refused(rig: Rig, command: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A function that replays a stream with bad input, and returns the only line of the error."""
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(rig.home / "replication.yaml"))

    def run(stream: str, *options: str) -> str:
        rig.settings()
        code, output, errors = command("replay", "--stream", stream, *options)
        assert code in (1, 2)
        assert not output
        (line,) = errors.strip().splitlines()
        return line

    return run


def live(rig: Rig, stream: str, *, drains: bool = True) -> None:
    """Let a fleet live for seven hours: `a` reports always, `b` falls silent twice, `c` leaves, `d` comes late."""
    for step in range(42):
        b_reports = step < 6 or 10 <= step < 16 or step >= 34
        nodes = ["a", *(["b"] if b_reports else []), *(["c"] if step < 8 else []), *(["d"] if step > 20 else [])]
        rig.publish(stream, report(*nodes, payload_bytes=step % 5))
        if drains and step % 7 == 3:
            rig.drain()
        rig.travel(minutes=10)
    if drains:
        rig.drain()


def history(rig: Rig, stream: str) -> list[Seen]:
    return [Seen(m.sequence, m.stored_ns, m.subject, m.headers, m.payload) for m in rig.stored(stream)]


def ns_of(text: str) -> int:
    """Return a time of the JSON, which has whole microseconds, in unix ns."""
    since = datetime.fromisoformat(text) - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * SECOND + since.microseconds * 1000


def time_of(ns: int) -> str:
    return f"{datetime.fromtimestamp(ns // SECOND, UTC):%Y-%m-%dT%H:%M:%S}.{ns % SECOND:09d}Z"


def at_ns(advisory: dict[str, Any]) -> int:
    return int(advisory["timestamp"]) * SECOND + int(advisory["event_time"][-10:-1])


def counted(expected: Expected, since_ns: int, until_ns: int) -> dict[str, int]:
    inside = [advisory["event"] for advisory in expected.advisories if since_ns <= at_ns(advisory) < until_ns]
    return {event: Counter(inside)[event] for event in ("new", "timeout", "recover", "expire")}


@pytest.mark.parametrize(
    ("options", "minutes"),
    (
        ((), (30, 120)),
        (("--warn-duration", "45m"), (45, 120)),
        (("--warn-duration", "11m", "--inspect-duration", "35m"), (11, 35)),
        (("--inspect-duration", "4h"), (30, 240)),
    ),
)
def test_replay_equals_the_independent_fold(
    rig: Rig, replay: Replay, tmp_path: Path, options: tuple[str, ...], minutes: tuple[float, float]
) -> None:
    stream = rig.make()
    live(rig, stream, drains=False)
    rig.add(stream, inspect_field="sender", **DURATIONS)
    seen = history(rig, stream)
    gone = [message.sequence for message in seen if message.sequence in (40, 41, 42, 43, 44)]
    for sequence in gone:
        rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence, "no_erase": True})
    seen = [message for message in seen if message.sequence not in gone]
    result = replay(stream, *options, "--out", str(tmp_path / "out"))
    since_ns, until_ns = ns_of(result["since"]), ns_of(result["until"])
    blind = blind_spans(seen, gone, until_ns)
    expected = expect(rules_of(stream, *minutes), seen, until_ns, blind)
    assert result["transitions"] == counted(expected, 0, until_ns)
    assert result["transitions"]["timeout"] > 0
    assert result["messages"] == len(seen)
    assert result["nodes"] == 4
    assert result["copies"] == len(expected.copied)
    assert result["recorded"] == dict.fromkeys(("new", "timeout", "recover", "expire"), 0)
    assert sum(day["advisories"] for day in result["days"]) == len(expected.advisories)
    written = parquet.read_table(tmp_path / "out" / "transitions.parquet").to_pylist()
    assert sorted((row["node"], row["event"], row["event_time"]) for row in written) == sorted(
        (each["value"], each["event"], datetime.fromtimestamp(0, UTC) + (row_time(at_ns(each))))
        for each in expected.advisories
    )
    seconds = dict[str, dict[str, float]]()
    for row in parquet.read_table(tmp_path / "out" / "availability.parquet").to_pylist():
        own = seconds.setdefault(row["node"], Counter())
        for name in ("up_seconds", "timeout_seconds", "retired_seconds"):
            own[name] += row[name]
    for node in ("a", "b", "c", "d"):
        wanted = watched_seconds(
            [each for each in expected.advisories if each["value"] == node], until_ns, blind, since_ns
        )
        assert {name: round(value, 3) for name, value in seconds[node].items()} == wanted


def row_time(ns: int) -> Any:
    return datetime.fromtimestamp(ns // SECOND, UTC).replace(microsecond=ns % SECOND // 1000) - datetime.fromtimestamp(
        0, UTC
    )


def watched_seconds(
    advisories: list[dict[str, Any]], until_ns: int, blind: list[tuple[int, int]], since_ns: int
) -> dict[str, float]:
    """Return a node's seconds by status, without blind time."""
    seconds = dict.fromkeys(("up_seconds", "timeout_seconds", "retired_seconds"), 0.0)
    status = {"new": "up", "recover": "up", "timeout": "timeout", "expire": "retired"}
    changes = [(max(at_ns(each), since_ns), status[each["event"]]) for each in advisories]
    for (begin, name), (end, _) in pairwise([*changes, (until_ns, "")]):
        seconds[f"{name}_seconds"] += (end - begin - covered(blind, begin, end)) / SECOND
    return {name: round(value, 3) for name, value in seconds.items()}


def test_verify_finds_a_tracked_stream_unchanged(rig: Rig, replay: Replay) -> None:
    stream = rig.make()
    rig.add(stream, inspect_field="sender", **DURATIONS)
    live(rig, stream)
    result = replay(stream, "--verify")
    assert result["differences"] == result["explained"] == []
    assert result["transitions"] == result["recorded"]
    assert result["copies"] == result["recorded_copies"] == len(rig.copies(stream))
    assert min(result["transitions"].values()) > 0
    assert result["silent"] == result["recorded_silent"]
