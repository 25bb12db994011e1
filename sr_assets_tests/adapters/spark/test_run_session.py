"""Which batches of a run go to Spark: by size, by the engine, and without waiting for it."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sr_assets.adapters.spark import run_session
from sr_assets.adapters.spark.run_session import HomeEngine, SparkConnection
from sr_assets.domain.errors import RunError
from sr_assets.domain.sizing import ENGINE_JOBS, JOB_BYTES, JOB_MESSAGES
from sr_assets.settings import SparkSettings
from sr_assets_tests.rig import PATIENCE_SECONDS, SITE, Rig, Sent, in_background, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SlowEngine(HomeEngine):
    """An engine that a test starts: `opened` waits for `ready`, and then joins the warm engine of a home."""

    def __init__(self, home: Path, *, warm: bool = False) -> None:
        super().__init__(SparkSettings(), home)
        self.warm, self.ready, self.opening = warm, threading.Event(), threading.Event()

    @property
    def is_warm(self) -> bool:
        return self.warm

    @contextlib.contextmanager
    def opened(self) -> Iterator["SparkSession"]:
        self.opening.set()
        assert self.ready.wait(PATIENCE_SECONDS)
        with super().opened() as session:
            yield session


@pytest.mark.parametrize(
    ("from_messages", "warm", "caught_up", "messages", "payload_bytes", "expected"),
    (
        (None, True, False, 1, 1, True),
        (None, True, True, JOB_MESSAGES - 1, 1, False),
        (None, True, True, JOB_MESSAGES, 1, True),
        (None, True, True, 1, JOB_BYTES, True),
        (None, False, False, 1, 1, False),
        (None, False, False, JOB_MESSAGES, 1, False),
        (100, True, False, 99, JOB_BYTES, False),
        (100, True, True, 100, 1, True),
        (100, False, True, 100, 1, False),
        (1, False, True, 1, 1, True),
        (0, False, True, 1, 1, True),
    ),
)
def test_batch_goes_to_a_warm_engine_if_it_is_worth_a_job(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    from_messages: int | None,
    messages: int,
    payload_bytes: int,
    *,
    warm: bool,
    caught_up: bool,
    expected: bool,
) -> None:
    monkeypatch.setattr(run_session, "_has_client", lambda: True)
    connection = SparkConnection(SlowEngine(tmp_path, warm=warm), from_messages, SITE)
    if caught_up:
        connection.note_drained()
    assert connection.takes(messages, payload_bytes, "reading") is expected


@pytest.mark.parametrize(
    ("from_messages", "nodes", "expected"), ((None, 10**8, False), (10, 9, False), (10, 10, True), (0, 0, True))
)
def test_daily_tables_go_to_an_engine_only_if_a_user_sends_them(
    tmp_path: Path, from_messages: int | None, nodes: int, *, expected: bool
) -> None:
    connection = SparkConnection(HomeEngine(SparkSettings(), tmp_path), from_messages, SITE)
    assert connection.takes_nodes(nodes, "availability") == expected


def test_process_without_the_client_does_its_first_small_batches_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_session, "_has_client", lambda: False)
    engine = SlowEngine(tmp_path, warm=True)
    connection = SparkConnection(engine, None, SITE)
    assert not connection.takes(1, 1, "reading")
    assert not engine.opening.is_set()
    assert not connection.takes(JOB_MESSAGES, 1, "reading")
    assert engine.opening.wait(PATIENCE_SECONDS)
    engine.ready.set()


@pytest.mark.nightly
def test_engine_starts_in_the_background_after_work_of_its_size(rig: Rig) -> None:
    engine = SlowEngine(rig.home)
    with contextlib.closing(SparkConnection(engine, None, SITE)) as connection:
        for _ in range(ENGINE_JOBS - 1):
            assert not connection.takes(JOB_MESSAGES, 1, "copying")
        assert not engine.opening.is_set()
        assert not connection.takes(JOB_MESSAGES, 1, "copying")
        assert engine.opening.wait(PATIENCE_SECONDS)
        assert not connection.takes(JOB_MESSAGES, 1, "copying"), "nothing waits for the engine"
        engine.ready.set()
        assert connection._warming is not None
        connection._warming.join(PATIENCE_SECONDS)
        assert connection.takes(JOB_MESSAGES, 1, "copying")
        connection.note_drained()
        assert not connection.takes(JOB_MESSAGES - 1, 1, "copying")
        with connection.use() as session:
            assert session.range(3).count() == 3


@pytest.mark.parametrize(("messages", "stays"), ((1, False), (JOB_MESSAGES, True)))
def test_run_that_has_caught_up_leaves_an_engine_without_its_work(rig: Rig, messages: int, *, stays: bool) -> None:
    """Runs linger one after another, and each would keep the engine for the next."""
    engine = HomeEngine(SparkSettings(), rig.home)
    with engine.opened(), contextlib.closing(SparkConnection(engine, None, SITE)) as connection:
        assert connection.takes(messages, 1, "reading")
        with connection.use() as session:
            assert session.range(2).count() == 2
        connection.note_drained()
        assert (connection._session is session) == stays


def test_run_that_ends_before_the_engine_is_ready_leaves_its_session(rig: Rig) -> None:
    engine = SlowEngine(rig.home)
    connection = SparkConnection(engine, 10, SITE)
    assert not connection.takes(10, 1, "copying")
    assert engine.opening.wait(PATIENCE_SECONDS)
    connection.close()
    engine.ready.set()
    assert connection._warming is not None
    connection._warming.join(PATIENCE_SECONDS)
    assert connection._session is None


def test_engine_that_does_not_start_costs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class BrokenEngine(SlowEngine):
        @contextlib.contextmanager
        def opened(self) -> Iterator["SparkSession"]:
            self.opening.set()
            raise RunError("the Spark engine did not start: no Java")
            yield

    engine = BrokenEngine(tmp_path)
    connection = SparkConnection(engine, 10, SITE)
    assert not connection.takes(10, 1, "copying")
    assert connection._warming is not None
    connection._warming.join(PATIENCE_SECONDS)
    engine.opening.clear()
    assert not connection.takes(10, 1, "copying")
    assert not engine.opening.is_set(), "it is not tried again immediately"
    assert [line for line in caplog.messages if "no Java" in line] == [
        "the Spark engine did not start: no Java; the run works without it"
    ]


def test_operations_of_other_sites_are_not_interrupted(rig: Rig) -> None:
    """Runs share a session; each interrupts only its own operations."""
    rig_engine = HomeEngine(SparkSettings(), rig.home)
    ours, theirs = (SparkConnection(rig_engine, 0, site) for site in (SITE, "PARIS"))
    with contextlib.closing(ours), contextlib.closing(theirs), ours.use() as session:
        with theirs.use() as other:
            assert session.client._session_id == other.client._session_id
        running, ended = rig.home / "running", rig.home / "ended"

        def task(rows: Iterator[object]) -> Iterator[object]:
            import threading

            for batch in rows:
                running.touch()
                while not ended.exists():
                    threading.Event().wait(0.05)
                yield batch

        def collect() -> int:
            with theirs.use() as other:
                return int(other.range(0, 1, 1, 1).mapInArrow(task, "id long").toArrow().num_rows)

        with in_background(collect) as job:
            try:
                wait_until(running.exists, "their task")
                ours.interrupt()
                # A query without a task: theirs may hold the only core.
                assert session.sql("SELECT * FROM VALUES (5) AS t (five)").toArrow().to_pylist() == [{"five": 5}]
            finally:
                ended.touch()
        assert job.result() == 1
        ended.unlink()

        def be_interrupted() -> None:
            with pytest.raises(RunError):
                collect()

        with in_background(be_interrupted) as waiting:
            while not waiting.done():
                theirs.interrupt()
                wait([waiting], 0.2)


def test_first_drain_of_a_run_goes_to_the_warm_engine(rig: Rig) -> None:
    rig.spark, stream = {}, rig.make()
    rig.add(stream, inspect_field="sender", inspect_duration="1h")
    rig.publish(stream, [Sent(b'{"sender": "a"}'), Sent(b'{"sender": "b"}'), Sent(b'{"sender": "a"}')])
    with HomeEngine(SparkSettings(), rig.home).opened():
        (report,) = rig.drain().values()
    row = rig.row("replication")
    assert (row["spark_messages"], row["local_messages"]) == (5, 0), "three are read, two copied"
    assert report.read_by == {"spark_messages": 3}
    assert report.copied_by == {"spark_messages": 2}
