"""A target that is down, dies or stops responding: a run does everything except the copies, which follow later."""

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sr_assets.adapters.state.status_file import read_status
from sr_assets.stages.report import Stage
from sr_assets.stages.run import SiteRun
from sr_assets.stages.site import Site
from sr_assets_tests.faults.rig import finish, start_run
from sr_assets_tests.rig import SITE, Rig, Sent, in_background, stop_process, wait_until
from sr_assets_tests.servers import NatsServer

TRACKED = {"inspect_field": "sender", "inspect_duration": "10h", "inspect_force_field": "force"}
BUDGET_SECONDS = 15


@pytest.fixture
def target(tmp_path: Path) -> Iterator[NatsServer]:
    """A target of the test's own, which it may kill or stop."""
    with NatsServer(tmp_path / "target", "target") as server:
        yield server


def forced(first: int, after: int, nodes: int = 20) -> list[Sent]:
    """Return messages that are all due for copying."""
    bodies = ({"sender": f"n{n % nodes}", "force": True, "n": n} for n in range(first, after))
    return [Sent(json.dumps(body).encode()) for body in bodies]


def numbers(rig: Rig, stream: str, server: NatsServer) -> list[int]:
    return [json.loads(copy.payload)["n"] for copy in rig.stored(stream, server)]


def freeze(server: NatsServer) -> Callable[[], None]:
    stop_process(server.pid)
    return lambda: os.kill(server.pid, signal.SIGCONT)


def kill(server: NatsServer) -> Callable[[], None]:
    server.kill()
    return lambda: (server.start(), None)[1]


def add_tracked_stream(rig: Rig, server: NatsServer, **entry: Any) -> tuple[str, str]:
    """Configure a stream with advisories on the source's cluster; return it and the advisory stream."""
    stream, advisories = rig.make(), rig.make("ADV")
    advisory = {"subject": f"{advisories}.%s.%v", "cluster": "source", "reliable": True}
    rig.add(stream, **{"target_url": server.url, "advisory": advisory, "batch_messages": 50, **TRACKED, **entry})
    return stream, advisories


@contextlib.contextmanager
def lingering_run(rig: Rig) -> Iterator[None]:
    """Run the site during the block; its budget ends with the block."""
    with ThreadPoolExecutor() as pool:
        run = pool.submit(rig.run, drain_only=False, run_budget="1h", linger="1h")
        try:
            yield
        finally:
            rig.travel(hours=2)
    run.result()


@pytest.mark.parametrize("fault", (kill, pytest.param(freeze, marks=pytest.mark.nightly)))
def test_run_without_its_target_does_everything_else_and_fails(
    rig: Rig, target: NatsServer, fault: Callable[[NatsServer], Callable[[], None]]
) -> None:
    stream, advisories = add_tracked_stream(rig, target)
    rig.publish(stream, forced(0, 120))
    heal = fault(target)
    rig.settings(run_budget=f"{BUDGET_SECONDS}s")
    # It ends by its budget instead of waiting for the target.
    (line,) = [line for line in finish(start_run(rig), 1).splitlines() if line.startswith("error: ")]
    assert target.address in line
    row = rig.row("replication")
    assert (row["seen_messages"], row["lag_messages"], row["queued_messages"]) == (120, 0, 120)
    assert row["last_error"] is not None
    assert rig.row("site_summary")["up"] == 20
    assert len(rig.stored(advisories)) == 20
    heal()
    rig.drain()
    assert numbers(rig, stream, target) == list(range(120))
    row = rig.row("replication")
    assert (row["copied_messages"], row["queued_messages"], row["last_error"]) == (120, 0, None)


@pytest.mark.parametrize("fault", (pytest.param(kill, marks=pytest.mark.nightly), freeze))
def test_lingering_run_publishes_promptly_during_a_target_outage(
    rig: Rig, target: NatsServer, fault: Callable[[NatsServer], Callable[[], None]]
) -> None:
    stream, advisories = add_tracked_stream(rig, target)
    rig.publish(stream, forced(0, 20))
    rig.drain()
    with lingering_run(rig), contextlib.ExitStack() as healing:
        for round_ in range(6):
            if round_ == 2:
                healing.callback(fault(target))
            before = rig.info(advisories).last_sequence
            rig.publish(
                stream, [Sent(json.dumps({"sender": f"late{round_}", "force": True, "n": 20 + round_}).encode())]
            )
            wait_until(lambda: rig.info(advisories).last_sequence > before, "an advisory", 30, every=0.2)  # noqa: B023  at once
    rig.drain()
    assert numbers(rig, stream, target) == list(range(26))
    assert len(rig.stored(advisories)) == 26


@pytest.mark.parametrize("persist", ("default", pytest.param("async", marks=pytest.mark.nightly)))
def test_target_that_dies_during_a_copy_loses_nothing(rig: Rig, target: NatsServer, persist: str) -> None:
    stream, advisories = add_tracked_stream(rig, target, target={"persist": persist})
    rig.publish(stream, forced(0, 1_000))
    with in_background(lambda: rig.run(run_budget="20s")) as run:
        wait_until(
            lambda: bool(rig.api(f"STREAM.INFO.{stream}", server=target).get("state", {}).get("messages")), "copies"
        )
        target.kill()
    failure = run.result()[stream].failure
    row = rig.row("replication")
    assert (row["seen_messages"], row["lag_messages"]) == (1_000, 0)
    assert len(rig.stored(advisories)) == 20
    assert failure is not None
    assert "\n" not in failure
    for _ in range(2):
        target.start()
        rig.drain()
        # An asynchronous target may have lost acknowledged copies.
        assert numbers(rig, stream, target) == list(range(1_000))
        row = rig.row("replication")
        assert (row["copied_messages"], row["queued_messages"]) == (1_000, 0)
        target.kill()


def test_dead_target_of_one_stream_leaves_others_running(rig: Rig, target: NatsServer) -> None:
    tracked, advisories = add_tracked_stream(rig, rig.target)
    dead, plain = rig.make(), rig.make()
    rig.add(dead, target_url=target.url, **TRACKED)
    rig.add(plain, target_url=target.url)
    for stream in (tracked, dead, plain):
        rig.publish(stream, forced(0, 100))
    target.kill()
    reports = rig.run(run_budget=f"{BUDGET_SECONDS}s")
    assert [bool(reports[stream].failure) for stream in (tracked, dead, plain)] == [False, True, True]
    assert numbers(rig, tracked, rig.target) == list(range(100))
    assert len(rig.stored(advisories)) == 20
    rows = {row["stream"]: row for row in rig.rows("replication")}
    assert rows[dead]["queued_messages"] == rows[dead]["seen_messages"] == 100
    # A lingering run also retries the plain stream between the other stream's advisories.
    with lingering_run(rig):
        for n in range(4):
            before = rig.info(advisories).last_sequence
            rig.publish(tracked, [Sent(json.dumps({"sender": f"new{n}"}).encode())])
            wait_until(lambda: rig.info(advisories).last_sequence > before, "an advisory", 30, every=0.2)  # noqa: B023  at once
    target.start()
    rig.drain()
    assert numbers(rig, dead, target) == numbers(rig, plain, target) == list(range(100))


def is_retrying(site: Site, stream: str, rounds: Iterator[bool]) -> bool:
    """Do a round; return whether copying has recorded an error."""
    next(rounds)
    return site.state.load_copying(stream).error is not None


@pytest.mark.parametrize("tracked", (True, False), ids=("tracked", "plain"))
def test_interrupted_run_keeps_the_error_that_it_retries(rig: Rig, target: NatsServer, tracked: bool) -> None:
    stream = rig.make()
    rig.add(stream, target_url=target.url, **(TRACKED if tracked else {}))
    rig.publish(stream, forced(0, 3))
    rig.drain()
    target.kill()
    for first in (3, 4):
        rig.publish(stream, forced(first, first + 1))
        with rig.open(run_budget="60s", linger="60s") as site:
            run = SiteRun(site, {stream: frozenset(Stage)}, drain_only=False)
            with contextlib.closing(run.rounds()) as rounds:
                wait_until(lambda: is_retrying(site, stream, rounds), "an error that is retried")
        error = rig.row("replication")["last_error"]
        assert target.address in (error or "")
        status = read_status(rig.home / "sites" / SITE).streams[stream]
        assert status.last_error == error
