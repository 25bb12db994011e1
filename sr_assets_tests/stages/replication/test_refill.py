"""The refill of the history on a home that lost it: the same rows as without the loss, each once."""

import json
from pathlib import Path
from typing import Any

import pytest

from sr_assets.adapters.crash_points import Point
from sr_assets.adapters.state.orders import read_refill
from sr_assets.stages.replication import refill
from sr_assets_tests.faults.holding import hold_at
from sr_assets_tests.faults.rig import await_marker
from sr_assets_tests.rig import SITE, Rig, Sent

pytestmark = pytest.mark.process

HISTORY = "SELECT node, sequence, stored_at, subject, payload_bytes, payload FROM {} ORDER BY ALL"


def reports(first: int, after: int) -> list[Sent]:
    bodies = [{"sender": f"n{n % 7}", "n": n, "pad": "x" * (n % 3)} for n in range(first, after)]
    return [Sent(json.dumps(body).encode()) for body in bodies]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refill, "_PART_MESSAGES", 8)


@pytest.fixture
def store(rig: Rig) -> dict[str, Any]:
    return {"checkpoint": {"interval": "1s", "bucket": rig.unique("STATE")}}


@pytest.fixture
def stream(rig: Rig, store: dict[str, Any]) -> str:
    """Run a tracked stream twice; node `silent` reports only at the beginning."""
    name, target = rig.make(), rig.unique("TARGET")
    rig.add(
        name,
        inspect_field="sender",
        inspect_duration="10h",
        size_trigger=1,
        batch_messages=10,
        target_stream=target,
        target_subject_prefix=target,
    )
    rig.publish(name, [Sent(b'{"sender": "silent"}'), Sent(b"no sender"), *reports(1, 30)])
    rig.drain(**store)
    rig.publish(name, reports(30, 45))
    rig.drain(**store)
    return name


def history(rig: Rig) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    return rig.rows(HISTORY.format("node_snapshots")), rig.rows(HISTORY.format("node_snapshot_history"))


def test_empty_home_refills_the_history(rig: Rig, stream: str, store: dict[str, Any]) -> None:
    before = history(rig)
    assert len(before[0]) == 8
    assert len(before[1]) > 20
    rig.lose("sites", "snapshots")
    # Work that the checkpoint does not know writes its own rows.
    rig.publish(stream, reports(45, 50))
    rig.drain(**store)
    newest, rows = history(rig)
    assert [row for row in rows if row["sequence"] <= 46] == before[1]
    assert {row["node"] for row in newest} == {row["node"] for row in before[0]}
    assert read_refill(rig.home / "sites" / SITE, rig.settings().streams[0]) is None


def test_home_without_history_refills_from_the_target_alone(rig: Rig, stream: str) -> None:
    """The source no longer holds the messages: only the nodes' newest rows are exact to the microsecond."""
    before = history(rig)
    rig.api(f"STREAM.PURGE.{stream}")
    rig.lose("snapshots")
    rig.drain()
    newest, rows = history(rig)
    assert newest == before[0]
    assert list(map(in_ms, rows)) == list(map(in_ms, before[1]))


def in_ms(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "stored_at": int(row["stored_at"].timestamp() * 1000)}


def test_remaining_files_are_kept_and_not_doubled(rig: Rig, stream: str, store: dict[str, Any]) -> None:
    before = history(rig)
    rig.lose("sites")
    files = sorted((rig.home / "snapshots").rglob("*.parquet"))
    files[1].unlink()
    rig.drain(**store)
    assert history(rig) == before


def test_killed_refill_doubles_no_row(rig: Rig, stream: str, store: dict[str, Any], tmp_path: Path) -> None:
    """The files of the first part are in place, and the index does not list them."""
    before, marker = history(rig), tmp_path / "held"
    rig.lose("sites", "snapshots")
    with pytest.MonkeyPatch.context() as environment:
        for name, text in hold_at(Point.REFILLING, marker).items():
            environment.setenv(name, text)
        run = rig.start(**store)
    await_marker(run, marker)
    run.kill()
    run.communicate()
    assert len(list((rig.home / "snapshots").rglob("[0-9]*.parquet"))) == 1
    rig.drain(**store)
    assert history(rig) == before
    rig.drain(**store)
    assert history(rig) == before
