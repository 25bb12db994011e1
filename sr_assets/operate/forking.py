"""Child processes that are copies of one which has imported the platform: they start at once and share its memory.

A process with threads cannot be copied: another thread may hold a lock. So `Copies` starts a process with one thread, the
original, before this process starts threads. The original makes the copies and reports their ends.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NoReturn, Self

from sr_assets.adapters.logs import take_tag
from sr_assets.operate.processes import INTERRUPTED, Child, child_environment, end_process, end_with_parent

#: `PR_SET_NAME` of prctl(2), which shortens the name to 15 bytes.
_SET_NAME: Final = 15
#: The longest request to the original: `import` and names of modules. With it come the descriptors of the
#: stdin, stdout, stderr and status of a child, if one is to be started.
_REQUEST_BYTES: Final = 1 << 12
#: What a status tells: the process's id, and at its end the exit code.
_NUMBER: Final = struct.Struct("=q")


class Copy:
    """A copy, with the methods of `Popen` that its parent uses."""

    def __init__(self, lifeline: int, status: int) -> None:
        """`lifeline` is the other end of its stdin; `status` tells its id, and at its end the exit code."""
        self.pid = _read_number(status)
        self.returncode: int | None = None
        self._end_with_parent = weakref.finalize(self, os.close, lifeline)
        self._status = status
        # Not at the end of the block: another thread may poll.
        weakref.finalize(self, os.close, status)
        self._guard = threading.Lock()

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process, unless it has ended, and wait for its end."""
        self._end_with_parent()
        self.wait()

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""
        return self._ended(0)

    def wait(self) -> int:
        """Wait for the end of the process and return the exit code; that of a kill if the original has ended."""
        code = self._ended(None)
        assert code is not None
        return code

    def _ended(self, milliseconds: int | None) -> int | None:
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        if poll.poll(milliseconds):
            with self._guard:
                if self.returncode is None:
                    try:
                        self.returncode = _read_number(self._status)
                    except EOFError:
                        self.returncode = -signal.SIGKILL
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM to the process, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


class Copies:
    """Starts children inside `with`: copies if this process has a single thread when it enters the block, else new processes."""

    def __init__(self) -> None:
        self._original: socket.socket | None = None

    def __enter__(self) -> Self:
        """Start the original."""
        if sys.platform == "linux" and threading.active_count() == 1:
            self._original, requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sys.stdout.flush()
            sys.stderr.flush()
            self._pid = os.fork()
            if self._pid == 0:
                self._original.close()
                _be_original(requests)
            requests.close()
        return self

    def __exit__(self, *_: object) -> None:
        """End the original."""
        if self._original:
            self._original.close()
            os.waitpid(self._pid, 0)

    def start(
        self,
        name: str,
        work: Callable[[], int],
        *,
        imports: Sequence[str] = (),
        errors: int | None = None,
        output: int | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Child:
        """Start a child that does some work, which can be pickled; the result is its exit code.

        `name` is shown by `top`. Before it makes a copy, the original imports the modules `imports`, which that child and later
        ones need; it ignores one that cannot be imported. The child leads a process group and has the variables of this process
        and those of `environ`. `errors` and `output` are the descriptors of its stderr and stdout, by default this process's. It
        ends with this process, even by SIGKILL.
        """
        outputs = (1 if output is None else output, 2 if errors is None else errors)
        child, lifeline = self._copy(imports, outputs) or _new(outputs)
        # The exit code tells that a child has ended already.
        with contextlib.suppress(BrokenPipeError), open(lifeline, "wb", closefd=False) as stdin:
            pickle.dump((name, {**child_environment(), **(environ or {})}, work), stdin)
        return child

    def prepare(self, imports: Sequence[str]) -> None:
        """Let the original import modules meanwhile, for a later child."""
        if self._original and imports:
            # Its end is no error here: the next child is a new process.
            with contextlib.suppress(OSError):
                self._original.send(_request(imports))

    def _copy(self, imports: Sequence[str], outputs: tuple[int, int]) -> tuple[Copy, int] | None:
        """Return a copy and the other end of its stdin; None without an original."""
        if self._original is None:
            return None
        (stdin, lifeline), (status, reported) = os.pipe(), os.pipe()
        try:
            try:
                socket.send_fds(self._original, [_request(imports)], [stdin, *outputs, reported])
            finally:
                os.close(stdin)
                os.close(reported)
            return Copy(lifeline, status), lifeline
        except (OSError, EOFError):
            os.close(lifeline)
            os.close(status)
            return None


def _request(imports: Sequence[str]) -> bytes:
    return " ".join(("import", *imports)).encode()


def _new(outputs: tuple[int, int]) -> tuple[subprocess.Popen[bytes], int]:
    """Return a new process and the other end of its stdin."""
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=outputs[0],
        stderr=outputs[1],
        start_new_session=True,
        env=child_environment(),
    )
    assert child.stdin is not None
    return child, child.stdin.fileno()


def _read_number(status: int) -> int:
    """Read the next number of a status; raise EOFError if the original has ended."""
    if not (read := os.read(status, _NUMBER.size)):
        raise EOFError
    number: int
    (number,) = _NUMBER.unpack(read)
    return number


# ------------------------------------------------------------------------------------------------------ in the original


def _be_original(requests: socket.socket) -> NoReturn:
    """Make a copy of this process for each request, and report the ends of copies, until the parent ends."""
    statuses = dict[int, int]()
    try:
        os.setsid()
        # A service manager stops all processes at once, but this one ends after the copies.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ends, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        while True:
            ready, _, _ = select.select([requests.fileno(), ends], [], [])
            if ends in ready:
                os.read(ends, 1 << 10)
                _report_ends(statuses)
            if requests.fileno() in ready:
                request, received, *_ = socket.recv_fds(requests, _REQUEST_BYTES, 4)
                if not request:
                    break
                _import_all(*request.decode().split()[1:])
                if not received:
                    continue
                *streams, status = received
                try:
                    pid = _make_copy(streams, (requests.fileno(), ends, waker, status, *statuses.values()))
                except OSError:
                    # The parent sees the end of the status.
                    os.close(status)
                else:
                    statuses[pid] = status
                    os.write(status, _NUMBER.pack(pid))
                for stream in streams:
                    os.close(stream)
    finally:
        os._exit(0)


def _make_copy(streams: Sequence[int], own: Sequence[int]) -> int:
    """Return the id of a new copy, which closes the `own` descriptors, when it leads its group and obeys signals.

    Earlier, a signal to the copy or its group would have no effect.
    """
    started, starting = os.pipe()
    with open(started, "rb", buffering=0) as start:  # noqa: PTH123  a descriptor
        try:
            pid = os.fork()
            if pid == 0:
                for descriptor in (*own, started):
                    os.close(descriptor)
                _be_copy(streams, starting)
        finally:
            os.close(starting)
        start.read(1)
    return pid


def _report_ends(statuses: dict[int, int]) -> None:
    """Report the exit codes of the copies that have ended, and forget these."""
    while statuses:
        pid, ended = os.waitpid(-1, os.WNOHANG)
        if not pid:
            break
        status = statuses.pop(pid)
        # Its parent may not wait.
        with contextlib.suppress(BrokenPipeError):
            os.write(status, _NUMBER.pack(os.waitstatus_to_exitcode(ended)))
        os.close(status)


@functools.cache
def _import_all(*names: str) -> None:
    # The collector would search the new modules again and again.
    gc.disable()
    for name in names:
        # A child imports it too, and reports the error.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()


def _be_copy(streams: Sequence[int], starting: int) -> NoReturn:
    """Do a copy's work; close `starting` when it begins."""

    def work() -> int:
        # Nothing of the parent's may run in the child; multiprocessing does this too.
        atexit._clear()  # noqa: SLF001
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(starting)
        warnings.simplefilter("ignore")
        return _work()

    _end_after(work)


# ---------------------------------------------------------------------------------------------------------- in the child


def _work() -> int:
    """Read what to do from stdin and do it."""
    try:
        with open(0, "rb", buffering=0, closefd=False) as stdin:
            name, environ, work = pickle.load(stdin)  # noqa: S301  from the parent
    except EOFError:
        # The parent has ended.
        return 1
    os.environ.clear()
    os.environ.update(environ)
    # It may be another folder than the parent's.
    tempfile.tempdir = None
    take_tag()
    end_with_parent()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_NAME, name.encode())
    code: int = work()
    return code


def _end_after(work: Callable[[], int]) -> NoReturn:
    """Work, and end as an interpreter does, except that it releases no object.

    DuckDB writes a long list to stderr if a thread that still runs keeps it from being released.
    """
    code = 1
    try:
        code = work()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  the process ends here
        traceback.print_exc()
    finally:
        end_process(code)


if __name__ == "__main__":
    _end_after(_work)
