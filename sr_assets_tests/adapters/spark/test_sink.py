"""Copying tasks: interruptions between an intent and its commit neither duplicate nor lose messages."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from sr_assets.adapters.connection_file import write_connection
from sr_assets.adapters.copying import copier
from sr_assets.adapters.copying.receipt import Receipt
from sr_assets.adapters.locking import lock
from sr_assets.adapters.spark.jobs import CopyWork, take_results
from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import MESSAGE_ID_HEADER, header_values
from sr_assets.settings import ClusterSettings
from sr_assets.stages.replication.batch import CopyBatch
from sr_assets_tests.axes import every_pair
from sr_assets_tests.faults.copying import copy_plan
from sr_assets_tests.rig import ALL_ON_SPARK, Rig, Sent, address, cluster, files_with, in_background, wait_until
from sr_assets_tests.servers import NatsServer

TRACKED = {"inspect_field": "sender", "inspect_duration": "10m", "inspect_force_field": "force"}


class CrashError(BaseException):
    """Simulates the end of the process."""


def numbered(count: int, *, first: int = 1, size_bytes: int = 0) -> list[Sent]:
    fill = "x" * size_bytes
    bodies = ({"sender": f"n{n % 5}", "n": n, "force": True, "fill": fill} for n in range(first, first + count))
    return [Sent(json.dumps(body).encode()) for body in bodies]


def numbers(rig: Rig, stream: str) -> list[int]:
    return [json.loads(copy.payload)["n"] for copy in rig.copies(stream)]


def crash(*_: object) -> None:
    raise CrashError


# ----------------------------------------------------------------------------------------------------- interrupted runs


@every_pair(
    {
        "step": {"before writing": "run", "before the commit": "_save_receipt"},
        "entry": {"plain": {}, "sampled": TRACKED},
        "workers": {"one worker": 1, "two workers": 2},
    }
)
def test_run_finishes_batch_interrupted_by_a_crash(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, step: str, entry: dict[str, Any], workers: int
) -> None:
    if workers > 1:
        entry = {"workers": workers, **(entry or {"order": "none"})}
    stream = rig.make()
    rig.add(stream, **entry)
    rig.publish(stream, numbered(10))
    rig.drain()
    rig.publish(stream, numbered(40, first=11))
    with monkeypatch.context() as patched:
        patched.setattr(CopyBatch, step, crash)
        with pytest.raises(CrashError):
            rig.run()
        with pytest.raises(CrashError):
            rig.run()
    # The decisions are committed; the copies wait in the queue.
    counters = rig.row("replication")
    decided_messages = ("inspect_field" in entry) * 40
    assert (counters["next_sequence"], counters["queued_messages"], counters["copied_messages"]) == (
        11 + decided_messages,
        decided_messages,
        10,
    )
    rig.publish(stream, numbered(5, first=51))
    (report,) = rig.drain().values()
    assert report.found == (0 if step == "run" else 40)
    copied = numbers(rig, stream)
    assert sorted(copied) == list(range(1, 56))
    assert entry.get("workers") or copied == sorted(copied)
    counters = rig.row("replication")
    assert (counters["seen_messages"], counters["copied_messages"], counters["next_sequence"]) == (55, 55, 56)
    assert counters["copied_bytes"] == sum(len(message.payload) for message in rig.stored(stream))
    if "inspect_field" in entry:
        newest = rig.rows("SELECT node, sequence FROM node_snapshots ORDER BY node")
        assert [row["sequence"] for row in newest] == [55, 51, 52, 53, 54]
        assert rig.row("SELECT count(*) AS n FROM node_advisories")["n"] == 5


def test_run_fills_holes_between_copies_found_after_a_crash(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run reads all stored copies, not just the last, and fills the holes between them."""
    stream = rig.make()
    rig.add(stream)
    rig.publish(stream, numbered(30))
    with monkeypatch.context() as patched:
        patched.setattr(CopyBatch, "_save_receipt", crash)
        with pytest.raises(CrashError):
            rig.run()
    for sequence in (1, 7, 8, 20):
        rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence}, rig.target)
    (report,) = rig.drain().values()
    assert report.found == 26
    assert sorted(numbers(rig, stream)) == list(range(1, 31))
    ids = [header_values(copy.headers, MESSAGE_ID_HEADER)[-1] for copy in rig.copies(stream)]
    assert sum(message_id.endswith(b"/r1") for message_id in ids) == 4
    assert rig.row("replication")["copied_messages"] == 30


def test_run_survives_short_target_outage(rig: Rig, tmp_path: Path) -> None:
    rig.spark, stream = ALL_ON_SPARK, rig.make()
    rig.publish(stream, numbered(6_000, size_bytes=300))
    with NatsServer(tmp_path, "mortal") as mortal:
        # The full target ends between two copies of a batch, which the writer goes on trying.
        rig.create(stream, mortal, max_msgs=1_000, discard="new")
        rig.add(stream, target_url=mortal.url)

        def restart_target() -> None:
            # The server acknowledges before it writes.
            wait_until(lambda: stored_bytes(tmp_path) >= 1_000 * 300, "copies on the disk")
            mortal.kill()
            mortal.start()
            rig.api(f"STREAM.UPDATE.{stream}", rig.info(stream, mortal).config | {"max_msgs": -1}, mortal)

        with in_background(restart_target):
            (report,) = rig.drain().values()
        assert 0 < report.found <= 1_000
        copied = [json.loads(copy.payload)["n"] for copy in rig.stored(stream, mortal)]
        assert copied == list(range(1, 6_001))
        assert rig.row("replication")["last_error"] is None


def stored_bytes(folder: Path) -> int:
    """Return the size of the messages in a server's folder."""
    return sum(file.stat().st_size for file in folder.rglob("*.blk"))


# ------------------------------------------------------------------------------------------------------ single writers


Write = Callable[..., Receipt]


@pytest.fixture
def stream(rig: Rig) -> str:
    name = rig.make()
    rig.create(name, rig.target)
    rig.publish(name, numbered(6))
    return name


@pytest.fixture
def write(rig: Rig, stream: str, tmp_path: Path) -> Write:
    """A function that runs a writer task for some sequences in this process."""
    source = str(write_connection(tmp_path / "source", address(rig.source)))
    changes = {"source_connection": source, "subjects": (f"{stream}.>",), "prefix": "", "next": 7}
    plan = copy_plan(tmp_path, address(rig.target), stream, stream, **changes)

    def task(sequences: Iterable[int] = range(1, 7), nodes: Iterable[str | None] | None = None, **more: Any) -> Receipt:
        columns = {"sequence": list(sequences), **({} if nodes is None else {"node": list(nodes)})}
        results = CopyWork(replace(plan, **more)).run(iter([pa.RecordBatch.from_pydict(columns)]))
        return take_results(pa.Table.from_batches(results), None)

    return task


def test_repeated_task_stores_each_message_once(rig: Rig, stream: str, write: Write) -> None:
    first, second = write(), write()
    assert (first.copied, first.found, first.missing) == (6, 0, [])
    assert (second.copied, second.found, second.copied_bytes) == (6, 6, first.copied_bytes)
    assert (second.target_sequence, second.target_holds) == (6, 6)
    assert numbers(rig, stream) == [1, 2, 3, 4, 5, 6]


def test_writer_resends_purged_duplicate_with_another_id(rig: Rig, stream: str, write: Write) -> None:
    write()
    for purge_number in (1, 2):
        rig.api(f"STREAM.PURGE.{stream}", server=rig.target)
        receipt = write(since=rig.info(stream, rig.target).last_sequence)
        assert (receipt.failure, receipt.copied) == (None, 6)
        copies = rig.copies(stream)
        assert [json.loads(copy.payload)["n"] for copy in copies] == [1, 2, 3, 4, 5, 6]
        ids = [header_values(copy.headers, MESSAGE_ID_HEADER) for copy in copies]
        assert all(len(values) == 1 and values[0].endswith(b"/r%d" % purge_number) for values in ids)


def test_writer_looks_up_duplicates_after_pending_acknowledgements(rig: Rig, stream: str, write: Write) -> None:
    rig.publish(stream, numbered(3000, first=7))
    write((1, 2))
    rig.api(f"STREAM.PURGE.{stream}", server=rig.target)
    receipt = write(range(1, 3007), next=3007, since=2)
    assert (receipt.failure, receipt.copied) == (None, 3006)
    assert sorted(numbers(rig, stream)) == list(range(1, 3007))


def test_duplicate_before_the_intent_reveals_another_replicator(rig: Rig, stream: str, write: Write) -> None:
    write()
    failure = write(since=rig.info(stream, rig.target).last_sequence).failure
    assert failure is not None
    assert "another replicator" in failure
    assert numbers(rig, stream) == [1, 2, 3, 4, 5, 6]


def test_copies_outside_the_intent_reveal_another_replicator(rig: Rig, stream: str, write: Write) -> None:
    write(range(1, 7))
    with pytest.raises(RunError, match="another replicator"):
        write(range(1, 3), first=1, next=3)
    assert len(rig.copies(stream)) == 6


def test_writer_ignores_copies_of_earlier_source_of_same_name(rig: Rig, stream: str, write: Write) -> None:
    write()
    assert write(created_ns=1_800_000_000_000_000_000).found == 0
    assert numbers(rig, stream) == [1, 2, 3, 4, 5, 6] * 2


def test_batch_stays_open_when_target_remains_full(
    rig: Rig, stream: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier, "_REFUSAL_SECONDS", 0.3)
    limited = {"name": stream, "subjects": [f"{stream}.>"], "discard": "new", "max_msgs": 4, "allow_direct": True}
    rig.api(f"STREAM.UPDATE.{stream}", limited, rig.target)
    receipt = write()
    assert receipt.failure is not None
    assert "10077" in receipt.failure
    assert receipt.copied == 4
    rig.api(f"STREAM.UPDATE.{stream}", {**limited, "max_msgs": -1}, rig.target)
    receipt = write()
    assert (receipt.failure, receipt.copied, receipt.found) == (None, 6, 4)
    assert numbers(rig, stream) == [1, 2, 3, 4, 5, 6]


def test_writer_keeps_order_when_full_target_gets_room(rig: Rig, stream: str, write: Write) -> None:
    limited = {"name": stream, "subjects": [f"{stream}.>"], "discard": "new", "max_msgs": 4, "allow_direct": True}
    rig.api(f"STREAM.UPDATE.{stream}", limited, rig.target)

    def make_room() -> None:
        with cluster(rig.target) as admin:
            while admin.stream_info(stream).last_sequence < 4:
                pass
        rig.api(f"STREAM.UPDATE.{stream}", {**limited, "max_msgs": -1}, rig.target)

    with in_background(make_room):
        receipt = write()
    assert (receipt.failure, receipt.copied, receipt.disordered) == (None, 6, 0)
    assert numbers(rig, stream) == [1, 2, 3, 4, 5, 6]


def test_writer_rejects_replaced_batch(rig: Rig, stream: str, write: Write, tmp_path: Path) -> None:
    (tmp_path / "batch").write_text("b2")
    with pytest.raises(RunError, match="was replaced by"):
        write()
    assert not rig.copies(stream)


def test_writer_waits_for_earlier_writer(
    rig: Rig, stream: str, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "writer-0.lock").open("a") as held_lock:
        assert lock(held_lock)
        with monkeypatch.context() as patched:
            patched.setattr(copier, "_LOCK_SECONDS", 0.1)
            with pytest.raises(RunError, match="earlier writer"):
                write()
        assert not rig.copies(stream)
    assert write().copied == 6


def test_writer_reports_messages_missing_in_source(rig: Rig, stream: str, write: Write) -> None:
    for sequence in (2, 3, 6):
        rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})
    assert write().missing == [(2, 4), (6, 7)]
    assert write((2, 4, 6)).missing == [(2, 3), (6, 7)]
    assert numbers(rig, stream) == [1, 4, 5]


def test_copied_message_counts_after_source_lost_it(rig: Rig, stream: str, write: Write) -> None:
    write()
    rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": 2})
    receipt = write()
    assert (receipt.copied, receipt.found, receipt.missing) == (6, 6, [])


def test_writer_parks_messages_with_unaccepted_subjects(rig: Rig, stream: str, write: Write) -> None:
    receipt = write(remove=f"{stream}.")
    assert [parked.sequence for parked in receipt.parked] == [1, 2, 3, 4, 5, 6]
    assert "does not take subject m" in receipt.parked[0].reason
    assert receipt.copied == 0
    assert "on_poison" in (write(remove=f"{stream}.", on_poison="stop").failure or "")
    assert not rig.copies(stream)


def test_repeated_task_stages_earlier_copies_as_parquet(rig: Rig, stream: str, write: Write, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    write((1,))
    write((1, 2, 4), ("a", None, "b"), staging=str(staging))
    (file,) = staging.glob("date=*/0.parquet")
    table = parquet.read_table(file, partitioning=None)
    assert table.select(["node", "sequence"]).to_pylist() == [
        {"node": "a", "sequence": 1},
        {"node": "b", "sequence": 4},
    ]
    assert numbers(rig, stream) == [1, 2, 4]


def test_writer_raises_when_target_is_unreachable(rig: Rig, stream: str, write: Write, tmp_path: Path) -> None:
    with NatsServer(tmp_path / "gone", "gone") as stopped:
        unreachable = write_connection(
            tmp_path / "lost", ClusterSettings((stopped.address,), connect_timeout_seconds=1.0)
        )
    with pytest.raises(RunError, match=str(stopped.port)):
        write(connection=str(unreachable))
    assert not rig.copies(stream)


def test_run_leaves_no_secret_in_files_or_errors(rig: Rig, tmp_path: Path) -> None:
    users = '{user: me, password: "hunter2secret"}'
    with NatsServer(tmp_path, "guarded", config=f"authorization {{ users: [{users}] }}") as guarded:
        stream = rig.make()
        rig.publish(stream, numbered(3))
        rig.add(stream, target_url=f"nats://me:hunter2secret@{guarded.address}")
        rig.drain()
        rig.publish(stream, numbered(3, first=4))
        guarded.stop()
        assert "hunter2secret" not in rig.failure()
    assert files_with("hunter2secret", rig.home) == ["replication.yaml"], "only the configuration may hold it"
