"""`replay` on real streams: against the independent fold of `reference`, and against what runs have recorded."""

import json
import random
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyarrow import parquet

from sr_assets.adapters.range_rows import RangeRead
from sr_assets.adapters.spark import replay_tasks
from sr_assets.adapters.state.operator_requests import Action
from sr_assets.adapters.state.store import SiteState
from sr_assets.definitions import build
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.tracking import replaying
from sr_assets.stages import replay as stage
from sr_assets.stages.operator_commands import act_on_node
from sr_assets.stages.report import Stage
from sr_assets_tests.reference import Expected, Rules, Seen, blind_spans, by_field, covered, expect
from sr_assets_tests.rig import ALL_ON_SPARK, SITE, Command, Rig, Sent

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
    seconds = dict[str, Counter[str]]()
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
    result = replay(stream, "--verify", "--warn-duration", DURATIONS["warn_duration"])
    assert result["differences"] == result["explained"] == []
    assert result["transitions"] == result["recorded"]
    assert result["copies"] == result["recorded_copies"] == len(rig.copies(stream))
    assert min(result["transitions"].values()) > 0
    assert result["silent"] == result["recorded_silent"]


def change_record(rig: Rig, statement: str) -> None:
    """Change the published transitions, as a fault of the tracking would."""
    with SiteState(rig.home / "sites" / SITE) as state, state.transaction():
        state.connection.execute(statement)
    rig.drain()


def test_verify_lists_what_a_wrong_record_lacks_and_invents(rig: Rig, replay: Replay, command: Command) -> None:
    stream = rig.make()
    rig.add(stream, inspect_field="sender", **DURATIONS)
    live(rig, stream)
    change_record(rig, "DELETE FROM transitions WHERE node = 'b' AND event = 'timeout' AND transition = 2")
    change_record(rig, "UPDATE transitions SET node = 'x' WHERE node = 'c' AND event = 'expire'")
    twice = "SELECT * REPLACE ('twice' AS event_id) FROM transitions WHERE node = 'a'"
    change_record(rig, f"INSERT INTO transitions BY NAME {twice}")
    result = replay(stream, "--verify", code=1)
    listed = [(each["node"], each["event"], each["only_in"], each["reason"]) for each in result["differences"]]
    assert sorted(listed) == [
        ("a", "new", "recorded", None),
        ("b", "timeout", "replayed", None),
        ("c", "expire", "replayed", None),
        ("x", "expire", "recorded", None),
    ]
    assert not result["explained"]
    code, output, _ = command("replay", "--stream", stream, "--verify", "--format", "csv")
    assert (code, len(output.splitlines())) == (1, 5)
    code, output, _ = command("replay", "--stream", f"{SITE}/{stream}", "--verify")
    assert code == 1
    assert output.splitlines()[-1] == "differences: 4 without a reason"


@pytest.mark.nightly
def test_verify_recognises_a_message_that_a_sweep_preceded(rig: Rig, replay: Replay) -> None:
    stream = rig.make()
    rig.add(stream, inspect_field="sender", **DURATIONS)
    live(rig, stream)
    # The node returned at its timeout, because the time of its message was before the watermark.
    swept = "(SELECT event_ns FROM transitions WHERE node = 'b' AND transition = 2)"
    change_record(rig, f"UPDATE transitions SET event_ns = {swept} WHERE node = 'b' AND transition = 3")
    result = replay(stream, "--verify")
    assert {(each["event"], each["reason"]) for each in result["explained"]} == {("recover", "late_message")}


def test_verify_of_a_part_begins_with_the_statuses_before_it(rig: Rig, replay: Replay) -> None:
    stream = rig.make()
    rig.add(stream, inspect_field="sender", **DURATIONS)
    live(rig, stream)
    seen = history(rig, stream)
    # In the first silence of `b`, and 25 minutes before its second one ends. The warm-up begins after the first messages.
    for first in (30, 80):
        since_ns, until_ns = seen[first].stored_ns, seen[-9].stored_ns
        part = replay(stream, "--verify", "--since", time_of(since_ns), "--until", time_of(until_ns))
        assert part["differences"] == part["explained"] == []
        expected = expect(rules_of(stream), seen, until_ns)
        assert part["transitions"] == part["recorded"] == counted(expected, ns_of(part["since"]), ns_of(part["until"]))
        assert part["messages"] == sum(since_ns <= message.stored_ns < until_ns for message in seen)
        assert part["copies"] == part["recorded_copies"]


def test_verify_names_the_legitimate_reasons(rig: Rig, replay: Replay) -> None:
    stream = rig.make()
    entry = rig.add(stream, inspect_field="sender", **DURATIONS)
    live(rig, stream)
    for sequence in (message.sequence for message in history(rig, stream)[40:44]):
        rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence, "no_erase": True})
    result = replay(stream, "--verify")
    assert {each["reason"] for each in result["explained"]} == {"deleted_since"}
    entry["warn_duration"] = "20m"
    result = replay(stream, "--verify")
    assert {each["reason"] for each in result["explained"]} == {"deleted_since", "other_durations"}
    assert not result["differences"]


@pytest.mark.nightly
def test_verify_recognises_nodes_that_an_operator_retired(rig: Rig, replay: Replay) -> None:
    stream = rig.make()
    rig.add(stream, inspect_field="sender", **DURATIONS)
    rig.publish(stream, report("a", "b", "c"))
    rig.travel(minutes=10)
    rig.drain()
    actions: list[tuple[Action, str]] = [("retire", "a"), ("retire", "b"), ("unretire", "b")]
    for action, node in actions:
        act_on_node(rig.settings(), action, node, None)
        rig.drain()
    for _ in range(3):
        rig.travel(minutes=15)
        rig.publish(stream, report("a", "b", "c"))
        rig.drain()
    result = replay(stream, "--verify")
    assert not result["differences"]
    assert {(each["node"], each["reason"]) for each in result["explained"]} == {
        ("a", "retired_by_hand"),
        ("b", "retired_by_hand"),
    }


@pytest.mark.nightly
def test_verify_of_a_shortened_source_begins_after_an_interval(
    rig: Rig, replay: Replay, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = rig.make()
    rig.add(stream, inspect_field="sender", **DURATIONS)
    live(rig, stream)
    seen = history(rig, stream)
    rig.api(f"STREAM.PURGE.{stream}", {"seq": seen[30].sequence})
    result = replay(stream, "--verify")
    earliest_ns = seen[30].stored_ns + 2 * 60 * MINUTE
    assert 0 <= ns_of(result["since"]) - earliest_ns <= 1_000
    expected = expect(rules_of(stream), seen, ns_of(result["until"]))
    assert result["transitions"] == counted(expected, ns_of(result["since"]), ns_of(result["until"]))
    assert result["differences"] == result["explained"] == []
    line = refused(stream, "--since", time_of(earliest_ns - MINUTE))
    assert line.endswith(f"use {time_of(ns_of(result['since']))} or later")
    # Messages that expire after the plan was made move the beginning of the default range.
    read = RangeRead.table

    def expire(wanted: RangeRead, part: SequenceRange) -> Any:
        rig.api(f"STREAM.PURGE.{stream}", {"seq": seen[33].sequence})
        return read(wanted, part)

    monkeypatch.setattr(RangeRead, "table", expire)
    later = replay(stream, "--verify")
    assert 0 <= ns_of(later["since"]) - seen[33].stored_ns - 2 * 60 * MINUTE <= 1_000
    assert not later["differences"]
    # A range between two messages has only the silence in it.
    since_ns = seen[-4].stored_ns + MINUTE
    quiet = replay(stream, "--since", time_of(since_ns), "--until", time_of(since_ns + MINUTE))
    assert (quiet["messages"], quiet["nodes"], quiet["silent"]) == (0, 0, 0)


@pytest.mark.nightly
def test_blind_time_of_the_record_applies_to_the_replay(rig: Rig, replay: Replay) -> None:
    stream = rig.make()
    rig.add(stream, inspect_field="sender", **DURATIONS)
    rig.publish(stream, report("a", "b"))
    rig.drain()
    rig.travel(minutes=20)
    rig.publish(stream, report("a", "b"))
    rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": 3, "no_erase": True})
    rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": 4, "no_erase": True})
    rig.travel(minutes=20)
    rig.publish(stream, report("a"))
    rig.drain()
    rig.travel(minutes=31)
    rig.publish(stream, report("a"))
    rig.drain()
    result = replay(stream, "--verify")
    # Without the blind 40 minutes, both would have timed out in them.
    assert result["transitions"] == {"new": 2, "timeout": 2, "recover": 1, "expire": 0}
    assert result["differences"] == result["explained"] == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("reason", "keys"),
    (
        ("max_nodes", {"max_nodes": 3}),
        ("max_age", {"max_age": "1h"}),
        ("purged", {"purge_after": "1h"}),
        ("queued", {}),
    ),
)
def test_verify_names_what_a_key_or_the_queue_has_left_out(
    rig: Rig, replay: Replay, reason: str, keys: dict[str, Any]
) -> None:
    stream = rig.make()
    rig.add(stream, inspect_field="sender", **DURATIONS, **keys)
    # With `max_age`, the first run reads most messages late.
    live(rig, stream, drains=reason != "max_age")
    if reason == "queued":
        rig.publish(stream, report("e", "f"))
        rig.travel(minutes=5)
    rig.drain(stages=[Stage.NODE_STATE] if reason == "queued" else tuple(Stage))
    result = replay(stream, "--verify")
    assert not result["differences"]
    assert {each["reason"] for each in result["explained"]} == {reason}


def test_bad_input_is_one_line_with_the_remedy(rig: Rig, refused: Callable[..., str]) -> None:
    stream, plain = rig.make(), rig.make("PLAIN")
    rig.add(stream, inspect_field="sender", **DURATIONS)
    rig.add(plain)
    assert "is empty; there is nothing to replay" in refused(stream)
    rig.publish(stream, report("a", "b"))
    assert "nothing is recorded yet, so --verify has nothing to compare; run it once first" in refused(
        stream, "--verify"
    )
    rig.drain()
    early, late = "2026-01-01T00:00:00Z", "2099-01-01T00:00:00Z"
    for options, remedy in (
        (("--since", late, "--until", early), "swap or correct them"),
        (("--until", late), "use this time or an earlier one"),
        (("--until", late, "--verify"), "let a run process newer messages"),
        (("--until", early), "use an earlier --since or a later --until, or let a run process newer messages"),
        (("--verify", "--warn-duration", "10m"), "leave out --warn-duration and --inspect-duration"),
        (("--warn-duration", "3h"), "must be shorter than --inspect-duration 7200s; set both"),
        (("--inspect-duration", "20m"), "--warn-duration 1800s must be shorter"),
        (("--since", "yesterday"), "use RFC 3339 such as 2026-01-31T12:00:00Z"),
    ):
        assert remedy in refused(stream, *options)
    assert "is not tracked, so there is nothing to replay; set inspect_duration" in refused(plain)


@pytest.mark.nightly
def test_spark_and_the_own_process_replay_the_same(
    rig: Rig, replay: Replay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_tasks, "_PORTION_ROWS", 2_000)
    stream = rig.make()
    for _ in range(30):
        rig.publish(stream, report(*(f"n{number}" for number in range(0, 200, 3)), payload_bytes=10))
        rig.publish(stream, [Sent(b"no sender"), *report(*(f"n{number}" for number in range(200)))])
    rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": 4_000, "no_erase": True})
    rig.add(stream, inspect_field="sender", size_trigger=8, **DURATIONS)
    options = ("--warn-duration", "0.002s", "--inspect-duration", "0.006s", "--out")
    here = replay(stream, *options, str(tmp_path / "here"))
    rig.spark = ALL_ON_SPARK
    until = ("--until", here["until"])
    there = replay(stream, *until, *options, str(tmp_path / "there"))
    assert there == here
    assert min(here["transitions"].values()) > 0
    for name in ("transitions", "availability"):
        tables = [parquet.read_table(tmp_path / side / f"{name}.parquet") for side in ("here", "there")]
        rows = [sorted(map(str, table.to_pylist())) for table in tables]
        assert rows[0] == rows[1]


def test_asset_replays_with_the_durations_of_the_launchpad(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, inspect_field="sender", **DURATIONS)
    live(rig, stream)
    definitions = build(rig.settings())
    asset = definitions.resolve_assets_def(dg.AssetKey(["fleet", "replay"]))
    config = {"ops": {asset.op.name: {"config": {"stream": f"{SITE}/{stream}", "warn_duration": "11m"}}}}
    result = dg.materialize([asset], run_config=config)
    (event,) = result.asset_materializations_for_node(asset.op.name)
    seen = history(rig, stream)
    values: dict[str, Any] = {name: value.value for name, value in event.metadata.items()}
    expected = expect(rules_of(stream, 11), seen, ns_of(values["until"]))
    assert values["dagster/row_count"] == len(expected.advisories)
    assert values["silent"] == sum(node["status"] == "timeout" for node in expected.nodes.values())
    timeouts = [
        sum(advisory["event"] == "timeout" for advisory in side.advisories)
        for side in (expected, recorded(rig, stream))
    ]
    assert f"| timeout | {timeouts[0]} | {timeouts[1]} |" in values["comparison"]
    assert values["advisories"].startswith("![advisories by day](data:image/png;base64,")


def recorded(rig: Rig, stream: str) -> Expected:
    """Return what a run with the configured durations must have recorded."""
    watermark = rig.row(f"SELECT epoch_us(watermark) AS us FROM replication WHERE stream = '{stream}'")["us"]
    return expect(rules_of(stream), history(rig, stream), watermark * 1000)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(7))
def test_verify_of_random_histories_finds_no_difference(
    rig: Rig, replay: Replay, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So few messages are several parts, and each part is folded in several steps.
    monkeypatch.setattr(replaying, "_FOLDED_TOGETHER", 20)
    monkeypatch.setattr(stage, "JOB_MESSAGES", 70)
    chance = random.Random(seed)
    stream = rig.make()
    classes = [
        {"name": "web", "match": "n1*", "inspect_duration": "70m", "warn_duration": "20m"},
        {"name": "vip", "header": "Kind", "value": "vip", "inspect_duration": "5h"},
    ]
    filters = {"filter_subject": f"{stream}.m.>"} if seed % 2 else {}
    rig.add(stream, inspect_field="sender", size_trigger=50, classes=classes, batch_messages=7, **filters, **DURATIONS)
    headers = (b"", b"NATS/1.0\r\nKind: vip\r\n\r\n")
    unread = list[int]()
    for _ in range(30):
        nodes = chance.sample(range(20), chance.randrange(12))
        first = rig.info(stream).last_sequence + 1
        subjects = [chance.choice(("m.x", "m.y", "other")) for _ in nodes]
        sent = [
            Sent(
                json.dumps({"sender": f"n{node}", "x": "x" * chance.choice((0, 3, 90))}).encode(),
                subject,
                chance.choice(headers),
            )
            for node, subject in zip(nodes, subjects, strict=True)
        ]
        rig.publish(stream, [*sent, Sent(b"no sender", "m.z")])
        unread += range(first, first + len(sent))
        if chance.random() < 0.15 and unread:
            rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": chance.choice(unread), "no_erase": True})
        rig.travel(minutes=chance.choice((1, 5, 15, 40)))
        if chance.random() < 0.4:
            rig.drain()
            unread.clear()
    rig.drain()
    result = replay(stream, "--verify")
    assert not result["differences"]
    # A sweep before a hole was known counts its time as silence: in so few messages, holes are long.
    assert {each["reason"] for each in result["explained"]} <= {"late_hole"}
    assert min(result["transitions"].values()) > 0
    seen = history(rig, stream)
    since_ns, until_ns = (seen[len(seen) * part // 8].stored_ns for part in (6, 7))
    part = replay(stream, "--verify", "--since", time_of(since_ns), "--until", time_of(until_ns))
    assert not part["differences"]
    # A message that is lost after it was read explains what it alone has caused.
    for sequence in chance.sample([message.sequence for message in seen], 3):
        rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence, "no_erase": True})
    result = replay(stream, "--verify")
    assert not result["differences"]
    assert {each["reason"] for each in result["explained"]} <= {"deleted_since", "late_hole"}
