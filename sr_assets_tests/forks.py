"""Python processes for tests that need not import the platform again: copies of a process that has imported it.

`sr-assets run` imports for seconds, longer than most tests take. Start a process by `subprocess` instead if imports, the import
path or a terminal are its subject.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
import warnings
from pathlib import Path
from typing import Any, AnyStr, Final

_IMPORTED: Final = (
    "dagster._cli",
    "dagster._core.executor.in_process",
    "dagster._core.instance.factory",
    "dagster._core.storage.local_compute_log_manager",
    "dagster._core.storage.sqlite_storage",
    "dagster._daemon.cli",
    "dagster_webserver.app",
    "pandas",
    "pyarrow.dataset",
    "pyspark.sql.connect.session",
    "sr_assets.cli",
    "sr_assets.cli.work",
    "sr_assets.definitions",
    "sr_assets.operate.due_work",
    "sr_assets.stages.run",
    "uvicorn",
)
#: `PR_SET_CHILD_SUBREAPER` of prctl(2).
_ADOPT: Final = 36
_LONGEST_REQUEST: Final = 1 << 17
_PIPE_ENDS: Final = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
#: The arguments of `Popen` that `_execute_child` gets, by position.
_ARGUMENTS: Final = tuple(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]


class Forked(subprocess.Popen[AnyStr]):
    """`Popen` for a Python command with `-m` or `-c`, and before it at most `-W ignore`; a child of this process.

    It knows `stdin`, `stdout`, `stderr`, `env`, `cwd` and `start_new_session`.
    """

    def _execute_child(self, *values: Any) -> None:
        given = dict(zip(_ARGUMENTS, values, strict=True))
        command = [os.fspath(part) for part in given["args"]]
        sys.audit("subprocess.Popen", command[0], command, given["cwd"], given["env"])
        request = {
            "command": command,
            "environ": dict(os.environ if given["env"] is None else given["env"]),
            "cwd": os.fspath(given["cwd"] or os.getcwd()),  # noqa: PTH109
            "leads": bool(given["start_new_session"]),
        }
        theirs = (given["p2cread"], given["c2pwrite"], given["errwrite"])
        descriptors = [own if end == -1 else end for own, end in enumerate(theirs)]
        self.pid = _started(json.dumps(request).encode(), descriptors)
        self._child_created = True
        self._close_pipe_fds(*(given[end] for end in _PIPE_ENDS))  # type: ignore[attr-defined]


def run_forked(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command by `Forked` to its end and return its output as text."""
    with Forked(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


@functools.cache
def _server() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the process that is copied, and return it with a connection to it; it ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-W", "ignore", "-m", __name__, str(theirs.fileno())]
        # A test may have added a `sitecustomize` for its own command, and all later ones would inherit what it does.
        environ = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        server = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            cwd=Path(__file__).parent.parent,
            env=environ,
            start_new_session=True,
        )
    atexit.register(stop)
    return server, ours


def stop() -> None:
    """End the process that is copied, if there is one; the next `Forked` starts another."""
    if _server.cache_info().currsize:
        server, connection = _server()
        connection.close()
        server.wait()
        _server.cache_clear()


def _started(request: bytes, descriptors: list[int]) -> int:
    """Let the server start a process and return its id; this process adopts it."""
    (_, server), libc = _server(), ctypes.CDLL(None)
    with _one_at_a_time:
        libc.prctl(_ADOPT, 1)
        try:
            socket.send_fds(server, [request], descriptors)
            pid = int(server.recv(_LONGEST_REQUEST))
            # By now its parent, which only started it, has ended.
            assert server.recv(_LONGEST_REQUEST) == b"adopted"
        finally:
            libc.prctl(_ADOPT, 0)
    return pid


_one_at_a_time = threading.Lock()


# ------------------------------------------------------------------------------------------------------- in the server


def _serve(connection: socket.socket) -> None:
    """Start a process for each request until the client ends."""
    while True:
        request, descriptors, *_ = socket.recv_fds(connection, _LONGEST_REQUEST, 3)
        if not request:
            return
        starter = os.fork()
        if starter == 0:
            pid = os.fork()
            if pid == 0:
                _be_process(descriptors=descriptors, **json.loads(request))
            connection.send(b"%d" % pid)
            os._exit(0)
        os.waitpid(starter, 0)
        connection.send(b"adopted")
        for descriptor in descriptors:
            os.close(descriptor)


def _be_process(command: list[str], environ: dict[str, str], cwd: str, descriptors: list[int], *, leads: bool) -> None:
    """Do what Python does for a command, and end this process."""
    code: object = 1
    try:
        if leads:
            os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.closerange(3, 1 << 10)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environ)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.path[:0] = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
        with contextlib.suppress(ImportError):
            sys.modules.pop("sitecustomize", None)
            importlib.import_module("sitecustomize")
        _run(command[1:])
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001  as the interpreter does
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            if isinstance(code, str):
                sys.stderr.write(f"{code}\n")
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def _run(arguments: list[str]) -> None:
    warnings.resetwarnings()
    if arguments[:2] == ["-W", "ignore"]:
        warnings.simplefilter("ignore")
        del arguments[:2]
    kind, subject, *sys.argv[1:] = arguments
    if kind == "-m":
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
        runpy.run_module(subject, run_name="__main__", alter_sys=True)
    else:
        assert kind == "-c", f"this command cannot be forked: {arguments}"
        sys.argv[0] = "-c"
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(subject, "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    for _name in _IMPORTED:
        importlib.import_module(_name)
    sys.argv[1:], _descriptor = [], int(sys.argv[1])
    gc.freeze()
    _serve(socket.socket(fileno=_descriptor))
    # DuckDB would print what its module still holds.
    os._exit(0)
