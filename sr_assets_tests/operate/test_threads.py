"""Every kind of background thread does its work again after errors of its body, whatever they are."""

import contextlib
import errno
import json
import logging
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from sr_assets.adapters import threads
from sr_assets.adapters.state.status_file import record_alive
from sr_assets.adapters.threads import BackgroundThread, failing_threads
from sr_assets.assets.host_run import HostRun
from sr_assets.operate import due_work, health, log_lines, static_values
from sr_assets.operate.health import Health, daemon_parts, watchdog_beside
from sr_assets.operate.log_lines import ChildLogs
from sr_assets.operate.metrics import MetricsServer, serving
from sr_assets.operate.metrics.samples import Exposition
from sr_assets.operate.notify import delivery, notify_beside
from sr_assets.settings import Settings
from sr_assets.stages import checkpointing, heartbeat_publisher, standby_tables
from sr_assets.stages.heartbeat_publisher import publisher_of
from sr_assets.stages.leadership import Leadership
from sr_assets.stages.site import Site
from sr_assets.stages.standby_tables import follow_checkpoints
from sr_assets_tests.exposed import SITES, configured
from sr_assets_tests.members import make_bucket, member
from sr_assets_tests.rig import SITE, Rig, Sent, wait_until


class Flaky:
    """A function that raises an error of the system and a defect in its first calls, and counts the calls that succeed."""

    def __init__(self, works: Callable[..., Any]) -> None:
        self._works, self.successes = works, 0
        self._errors = [OSError(errno.ENOSPC, "No space left on device"), ValueError("a defect")]

    def __get__(self, owner: object, _kind: type | None = None) -> Callable[..., Any]:
        return lambda *arguments, **options: self(owner, *arguments, **options)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Raise the next error, or call the function."""
        if self._errors:
            raise self._errors.pop(0)
        result = self._works(*arguments, **options)
        self.successes += 1
        return result


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restart bodies, and repeat the work of each, almost without a pause."""
    monkeypatch.setattr(threads, "_FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(health, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(static_values, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(serving, "_TEXTFILE_SECONDS", 0.05)
    monkeypatch.setattr(delivery, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr("sr_assets.assets.host_run._PICK_UP_SECONDS", 0.05)


@contextmanager
def _metrics(settings: Settings) -> Iterator[None]:
    with MetricsServer(Exposition(settings), "127.0.0.1", 0):
        yield


@contextmanager
def _due_part(_settings: Settings) -> Iterator[None]:
    work = due_work.DueWork.__new__(due_work.DueWork)
    with BackgroundThread("due jobs", due_work._repeated(work.run_jobs, 0.05)):
        yield


@contextmanager
def _watchdog(settings: Settings) -> Iterator[None]:
    os.environ["NOTIFY_SOCKET"] = "@nobody"
    try:
        with watchdog_beside(Health(settings)):
            yield
    finally:
        del os.environ["NOTIFY_SOCKET"]


def _host_run(settings: Settings) -> Any:
    host = HostRun(settings, "run", 1, lambda *_: iter(()), logging.getLogger("test"))
    return host.open(lingers=True)


def _daemon_parts(_settings: Settings) -> Any:
    return daemon_parts(dg.DagsterInstance.ephemeral, time.time, poll_seconds=0.05)


#: By kind: the module or class, the name of the function in the body, and a context manager with the thread.
KINDS: dict[str, tuple[object, str, Callable[[Settings], Any]]] = {
    "notifications": (delivery._Delivery, "_deliver", notify_beside),
    "metrics tables": (Exposition, "renew", _metrics),
    "http server": (serving._Server, "handle_request", _metrics),
    "metrics file": (
        serving,
        "_write",
        lambda settings: serving._textfile_beside(Exposition(settings), settings.metrics),
    ),
    "static values": (static_values, "warn_of_changes", static_values.static_values_watched),
    "daemon heartbeats": (dg.DagsterInstance, "get_daemon_statuses", _daemon_parts),
    "watchdog": (Health, "hung", _watchdog),
    "host run": (HostRun, "_start_next_queued", _host_run),
    "due work": (due_work.DueWork, "run_jobs", _due_part),
}


@pytest.mark.parametrize("kind", KINDS)
def test_thread_of_this_host_works_again(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, start = KINDS[kind]
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    settings = configured(
        tmp_path,
        *SITES,
        notify=[{"command": ["true"]}],
        metrics={"textfile": str(tmp_path / "sr_assets.prom")},
        data={"fixed": {"type": "memory", "values": {"cadence": "1h"}}},
        sensor={"interval": {"data": "fixed/cadence"}},
    )
    flaky = Flaky((lambda *_: None) if kind == "due work" else getattr(owner, name))
    with contextlib.ExitStack() as stack:
        if kind == "metrics tables":
            # The first call is in the caller's thread.
            stack.enter_context(start(settings))
            monkeypatch.setattr(owner, name, flaky)
        else:
            monkeypatch.setattr(owner, name, flaky)
            stack.enter_context(start(settings))
        wait_until(lambda: flaky.successes > 1, f"{kind} to work again")
        wait_until(lambda: failing_threads() == {}, "the recovery")


@pytest.fixture
def elected(rig: Rig, tmp_path: Path) -> Settings:
    """A member with a stream, a store of checkpoints and heartbeats."""
    stream = rig.make()
    rig.publish(stream, [Sent()])
    rig.add(stream, target_stream=rig.make("TARGET", rig.target), target_subject_prefix=rig.unique("copy"))
    beats = {"url": rig.source.url, "interval": "100ms", "subjects": [{"subject": f"{stream}.beat"}]}
    return member(rig, tmp_path, "a", make_bucket(rig), heartbeats=beats)


def test_election_works_again(elected: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    with Leadership(elected, SITE) as leadership:
        leadership.require()
        flaky = Flaky(Leadership._campaign)
        monkeypatch.setattr(Leadership, "_campaign", flaky)
        wait_until(lambda: flaky.successes > 1 and leadership.leads, "another renewal")


def test_heartbeats_work_again(elected: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    flaky = Flaky(heartbeat_publisher.publish_heartbeat)
    monkeypatch.setattr(heartbeat_publisher, "publish_heartbeat", flaky)
    said: list[str] = []
    with publisher_of(elected, said.append):
        wait_until(lambda: flaky.successes > 1, "two heartbeats")
    assert said == []


def test_checkpoints_work_again(elected: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    flaky = Flaky(checkpointing.store_state)
    monkeypatch.setattr(checkpointing, "store_state", flaky)
    with Leadership(elected, SITE) as leadership:
        leadership.require()
        with Site(elected, SITE, owner="test", run_id="test"):
            wait_until(lambda: flaky.successes == 1, "a checkpoint")


def test_shown_checkpoints_work_again(elected: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    flaky = Flaky(standby_tables.FollowedSite.show_if_due)
    monkeypatch.setattr(standby_tables.FollowedSite, "show_if_due", flaky)
    with follow_checkpoints(elected, [SITE]):
        wait_until(lambda: flaky.successes > 1, "two attempts")


def test_log_of_a_child_works_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flaky = Flaky(log_lines.as_event)
    monkeypatch.setattr(log_lines, "as_event", flaky)
    logs = ChildLogs(configured(tmp_path, log_format="json"), to_file=False)
    with logs.output("child") as writer:
        assert writer is not None
        kept = os.dup(writer)
    with os.fdopen(kept, "wb", buffering=0) as pipe:

        def writes_until_read() -> bool:
            pipe.write(b"WARNING:a:line\n")
            return flaky.successes > 0

        wait_until(writes_until_read, "an event")
    logs.close()
    assert json.loads(capsys.readouterr().err.splitlines()[-1])["message"].startswith("line")


def test_failing_thread_of_a_child_is_unhealthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, folder = configured(tmp_path), tmp_path / "sites" / SITES[0]
    folder.mkdir(parents=True)
    health_of = Health(settings)

    def fails() -> Generator[float]:
        raise RuntimeError("a defect")
        yield

    record_alive(folder)
    assert health_of.answer("/healthz") == (200, "ok\n")
    with BackgroundThread("checkpoints london", fails):
        wait_until(lambda: bool(failing_threads()), "the failure")
        record_alive(folder)
    assert failing_threads() == {}
    # The child's file is all that the parent has.
    assert health_of.answer("/healthz") == (200, "ok\n")
    began = time.time()
    monkeypatch.setattr("sr_assets.operate.health.times.time", lambda: began + 119)
    monkeypatch.setattr(health, "_PROGRESS_SECONDS", 118)
    os.utime(folder / "alive", (began + 119, began + 119))
    code, text = health_of.answer("/healthz")
    assert (code, text.startswith("checkpoints london: failing for 1m59s: RuntimeError: a defect")) == (503, True), text
    record_alive(folder)
    os.utime(folder / "alive", (began + 119, began + 119))
    assert health_of.answer("/healthz") == (200, "ok\n")


def test_member_without_campaigns_is_not_ready(elected: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Leadership(elected, SITE) as leadership:
        leadership.require()
        with monkeypatch.context() as disk:
            disk.setattr("sr_assets.adapters.state.lease.write_private", full)
            wait_until(lambda: any("does not campaign" in line for line in Health(elected).failing()), "the line")
        wait_until(lambda: leadership.leads, "a term after space was freed")
        assert not any("does not campaign" in line for line in Health(elected).failing())
