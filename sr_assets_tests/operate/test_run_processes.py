"""The processes of runs that a code server starts."""

import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from tempfile import TemporaryDirectory

import dagster as dg
import psutil
import pytest

from sr_assets.operate.services import Services
from sr_assets_tests.operate.rig import runner_pid
from sr_assets_tests.rig import PATIENCE_SECONDS, SITE, Rig, Sent, wait_until

FORK_SERVER = "multiprocessing.forkserver"
#: Each copy draws a number, and has a child of its own.
COPIES = """
import atexit, multiprocessing, os
import numpy as np
from sr_assets.automation.run_processes import share_run_imports

def copy():
    child = os.fork()
    if child == 0:
        os._exit(7)
    atexit.register(print, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), np.random.rand(), flush=True)

if __name__ == "__main__":
    share_run_imports()
    for _ in range(2):
        process = multiprocessing.get_context("spawn").Process(target=copy)
        process.start()
        process.join()
"""


@pytest.fixture
def services(rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Services:
    """Dagster's daemon and code server for a site with one unread message, whose run lingers."""
    stream = rig.make()
    rig.publish(stream, [Sent()])
    rig.add(stream, target_subject_prefix="c")
    settings = rig.settings(sensor={"interval": "1s"}, linger="60s")
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(rig.home / "replication.yaml"))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "dagster"))
    return Services(settings, None)


def parent_of(process: psutil.Process) -> psutil.Process:
    """Return the process that started another one."""
    parent = process.parent()
    assert parent is not None
    return parent


def await_run(rig: Rig, after: int = 0) -> psutil.Process:
    """Return the process of the site's run, which is not `after`."""
    wait_until(lambda: runner_pid(rig.home, SITE) not in {0, after}, "the run")
    return psutil.Process(runner_pid(rig.home, SITE))


def ignores_sigterm(process: psutil.Process) -> bool:
    ignored = re.search(r"SigIgn:\s+(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    assert ignored is not None
    return bool(int(ignored[1], 16) >> (signal.SIGTERM - 1) & 1)


def last_event(instance: dg.DagsterInstance) -> str:
    (run,) = instance.get_runs(limit=1)
    events = [entry.dagster_event for entry in instance.all_logs(run.run_id) if entry.dagster_event]
    return events[-1].message or ""


def test_runs_share_imports_and_end_with_their_code_server(
    services: Services, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TemporaryDirectory() as parent:
        # It is too long for the address of a socket.
        folder = Path(parent) / ("t" * 100)
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        # A process that was killed left this.
        left = folder / "sr-left"
        left.mkdir()
        (rig.home / "up.tmp").write_text(str(left))
        with services:
            run = await_run(rig)
            fork_server = parent_of(run)
            assert FORK_SERVER in fork_server.cmdline()[-1]
            # The signal that stops the services reaches the whole process group.
            assert ignores_sigterm(fork_server)
            assert not ignores_sigterm(run)
            private = Path(fork_server.environ()["TMPDIR"])
            assert private.stat().st_mode & 0o777 == 0o700
            sockets = [each.laddr for each in fork_server.net_connections("unix") if each.status == psutil.CONN_LISTEN]
            assert all(Path(str(socket)).is_relative_to(private) for socket in sockets)
        assert not list(folder.iterdir())
        assert not private.exists()
        assert not (rig.home / "up.tmp").exists()
    _, alive = psutil.wait_procs([run, fork_server], timeout=PATIENCE_SECONDS)
    assert not alive
    with dg.DagsterInstance.get() as instance:
        # The run ended itself: it did not lose its process.
        assert last_event(instance) == f"Process for run exited (pid: {run.pid})."


# The test above ends the runs, and tests of the services show that they start again what has ended.
@pytest.mark.nightly
def test_runs_end_with_their_fork_server_and_the_next_has_another(services: Services, rig: Rig) -> None:
    with services:
        run = await_run(rig)
        fork_server = parent_of(run)
        fork_server.kill()
        following = parent_of(await_run(rig, after=run.pid))
        assert not run.is_running()
        assert FORK_SERVER in following.cmdline()[-1]
        assert following.pid != fork_server.pid


@pytest.mark.process
def test_copies_have_own_random_numbers_and_call_exit_functions(tmp_path: Path) -> None:
    script = tmp_path / "copies.py"
    script.write_text(COPIES)
    command = [sys.executable, str(script), "api", "grpc"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    (first, drawn), (second, drawn_again) = (line.split() for line in printed)
    assert first == second == "7"
    assert drawn != drawn_again
