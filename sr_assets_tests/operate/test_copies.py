"""Children of a process: copies of it, or new processes."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sr_assets_tests import forks
from sr_assets_tests.forks import Forked, run_forked
from sr_assets_tests.rig import wait_until

pytestmark = pytest.mark.process

#: Starts a child, whose work is the second argument, and prints its exit code, or its id before the end of the parent.
PARENT = """
import atexit, os, signal, sys, threading
from functools import partial
from sr_assets.operate import forking
kind, work, *kill = sys.argv[1:]
atexit.register(print, "end of the parent")
if kind == "new":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
with forking.Copies() as children, children.start("its name", partial(eval, work)) as child:
    assert isinstance(child, forking.Copy) == (kind == "copy")
    if kill:
        print(child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    code = child.wait()
    assert child.poll() == code
print(code, flush=True)
"""

#: Stops children that have just been started, and prints how they ended.
STOPPING = """
import signal
from functools import partial
from sr_assets.operate import forking, processes
with forking.Copies() as copies:
    for _ in range(100):
        with copies.start("its name", partial(eval, "__import__('threading').Event().wait()")) as child:
            processes.signal_group(child, signal.SIGTERM)
            print(child.wait())
"""

#: What a child does, and its exit code.
WORKS = (
    ("7", 7),
    ("__import__('os').kill(__import__('os').getpid(), 9)", -9),
    ("__import__('os').getpgid(0) - __import__('os').getpid()", 0),
    ("__import__('sys').exit('lost')", 1),
    ("1 // 0", 1),
    ("open('/proc/self/comm').read() == 'its name\\n'", 1),
    ("__import__('atexit').register(print, 'end of the child') and 3", 3),
)


@pytest.mark.parametrize(
    ("kind", "work", "code"),
    (
        *(("copy", *each) for each in WORKS),
        # Two ways to end a new process are enough: our code is the same for all.
        *(
            pytest.param("new", *each, marks=() if number < 2 else pytest.mark.nightly)
            for number, each in enumerate(WORKS)
        ),
    ),
)
def test_child_leads_a_group_and_ends_with_its_own_code(kind: str, work: str, code: int) -> None:
    ended = run_forked([sys.executable, "-c", PARENT, kind, work])
    assert ended.returncode == 0, ended.stderr
    child_end = ["end of the child"] if "atexit" in work else []
    assert ended.stdout.splitlines() == [*child_end, str(code), "end of the parent"]
    assert ("ZeroDivisionError" in ended.stderr) == ("//" in work)


def test_signal_reaches_a_child_that_has_just_been_started() -> None:
    ended = run_forked([sys.executable, "-c", STOPPING])
    assert ended.stdout.split() == ["-15"] * 100, ended.stderr


@pytest.mark.parametrize("kind", ("copy", "new"))
def test_child_ends_with_its_parent(kind: str) -> None:
    command = [sys.executable, "-c", PARENT, kind, "__import__('threading').Event().wait()", "kill"]
    with Forked(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie", "the child's end")


def test_commands_of_tests_inherit_no_code_of_another_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.customized = True\n")
    command = [sys.executable, "-c", "import builtins; print(hasattr(builtins, 'customized'))"]
    # The next command starts the process that all later ones copy.
    forks.stop()
    with monkeypatch.context() as environment:
        environment.setenv("PYTHONPATH", str(tmp_path))
        assert run_forked(command).stdout == "True\n"
    assert run_forked(command).stdout == "False\n"
