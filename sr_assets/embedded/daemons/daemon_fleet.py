"""A fleet of daemons in this process, or in several ones that start and end together."""

import asyncio
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Final

from sr_assets.adapters import times
from sr_assets.domain.errors import ConfigurationError, RunError, SrAssetsError
from sr_assets.embedded.daemons.adapter import Adapter
from sr_assets.embedded.daemons.job import Counters, Job
from sr_assets.embedded.daemons.node import Part
from sr_assets.embedded.emulator import require_stream

_REPORT_SECONDS: Final = 0.5
_STOP_SECONDS: Final = 10.0
_SETTLE_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.05
#: The index of the adapter's process.
_ADAPTER: Final = -1


class DaemonFleet:
    """The fleet of a job. `run()` returns at its end; `counters()` may be called from another thread."""

    def __init__(self, job: Job) -> None:
        if job.adapter and job.subject.replace("%s", "node") == job.ingest:
            raise ConfigurationError(f"--subject {job.subject}: the adapter reads it; store under another subject")
        self.job = job
        self._parts: dict[int, Counters] = {}
        # The pipes of the running processes, and the indexes of those that are not ready yet.
        self._pipes: dict[int, Connection] = {}
        self._waiting: set[int] = set()
        self._error: str | None = None

    def counters(self) -> Counters:
        """Return what the fleet has done so far."""
        return Counters.total(self._parts.values())

    def run(self) -> None:
        """Run the plan; raises RunError if no stream takes the subject, or a process of the fleet fails."""
        require_stream(self.job.cluster, self.job.subject.replace("%s", self.job.plan.sender(0)))
        if self.job.processes == 1:
            counters = self._parts[0] = Counters()
            asyncio.run(_run_alone(self.job, counters))
        else:
            self._run_processes()

    def _run_processes(self) -> None:
        with self._children():
            try:
                self._waiting = set(self._pipes)
                while self._waiting and self._error is None:
                    self._take()
                self._send("start", times.monotonic())
                while self._error is None and any(index != _ADAPTER for index in self._pipes):
                    self._take()
            except KeyboardInterrupt:
                self._end(_STOP_SECONDS)
                raise
            self._end(_STOP_SECONDS)
        if self._error is not None:
            raise RunError(self._error)

    @contextmanager
    def _children(self) -> Iterator[None]:
        context = multiprocessing.get_context("spawn")
        children: list[SpawnProcess] = []
        try:
            with _safe_path():
                for index in [*range(self.job.processes), *([_ADAPTER] if self.job.adapter else [])]:
                    ours, theirs = context.Pipe()
                    child = context.Process(target=run_child, args=(self.job, index, theirs), daemon=True)
                    child.start()
                    theirs.close()
                    children.append(child)
                    self._pipes[index], self._parts[index] = ours, Counters()
            yield
        finally:
            for child in children:
                child.terminate()
                child.join()

    def _take(self, timeout_seconds: float = _REPORT_SECONDS) -> None:
        """Take the reports that have arrived."""
        for pipe in wait(list(self._pipes.values()), timeout_seconds):
            index = next(index for index, own in self._pipes.items() if own is pipe)
            try:
                word, value = self._pipes[index].recv()
            except (EOFError, OSError):
                word, value = "error", f"process {index} of the fleet ended unexpectedly; check this machine's memory"
            match word:
                case "ready":
                    self._waiting.discard(index)
                case "counters" | "end":
                    self._parts[index] = Counters(**value)
                case "error":
                    self._error = self._error or value
            if word in ("end", "error"):
                self._waiting.discard(index)
                self._pipes.pop(index).close()

    def _send(self, word: str, value: float) -> None:
        for pipe in self._pipes.values():
            try:
                pipe.send((word, value))
            except OSError:
                continue

    def _end(self, limit_seconds: float) -> None:
        """Stop the remaining processes, the adapter last: it must still receive `value` messages."""
        self._send("stop", Counters.total(self._parts.values()).published)
        deadline = times.monotonic() + limit_seconds
        while self._pipes and times.monotonic() < deadline:
            self._take()


@contextmanager
def _safe_path() -> Iterator[None]:
    """Keep processes that start here from searching the current folder for modules, which multiprocessing does first."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


class _OwnGate:
    """The gate of a fleet in one process."""

    def __init__(self) -> None:
        self.stopped = asyncio.Event()

    async def start(self) -> float:
        """Start immediately."""
        return times.monotonic()


async def _run_alone(job: Job, counters: Counters) -> None:
    async with AsyncExitStack() as stack:
        adapter = await stack.enter_async_context(Adapter(job, counters)) if job.adapter else None
        await Part(job, 0, counters, _OwnGate()).run()
        if adapter is not None:
            await _settle(adapter, counters, counters.published)


async def _settle(adapter: Adapter, counters: Counters, published: int) -> None:
    """Wait until the adapter has received and stored all messages, as long as more arrive."""
    received, deadline = -1, times.monotonic() + _SETTLE_SECONDS
    while times.monotonic() < deadline and (counters.adapter_received < published or not adapter.is_idle):
        if counters.adapter_received != received:
            received, deadline = counters.adapter_received, times.monotonic() + _SETTLE_SECONDS
        await asyncio.sleep(_POLL_SECONDS)


def run_child(job: Job, index: int, pipe: Connection) -> None:
    """Run a process of the fleet: the nodes of an index, or the adapter."""
    # Ctrl-C in a terminal reaches all processes; the parent stops this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    counters = Counters()
    try:
        asyncio.run(_run_child(job, index, pipe, counters))
    except SrAssetsError as error:
        pipe.send(("error", str(error)))
    else:
        pipe.send(("end", counters.as_dict()))


async def _run_child(job: Job, index: int, pipe: Connection, counters: Counters) -> None:
    gate = _PipeGate(pipe)
    reporting = asyncio.create_task(gate.report(counters))
    try:
        if index == _ADAPTER:
            async with Adapter(job, counters) as adapter:
                await gate.start()
                await gate.stopped.wait()
                await _settle(adapter, counters, int(gate.value))
        else:
            await Part(job, index, counters, gate).run()
    finally:
        reporting.cancel()


class _PipeGate:
    """The gate of a child process; it ends the process together with its parent."""

    def __init__(self, pipe: Connection) -> None:
        self.stopped, self.value = asyncio.Event(), 0.0
        self._pipe, self._started = pipe, asyncio.Event()
        asyncio.get_running_loop().add_reader(pipe.fileno(), self._receive)

    async def start(self) -> float:
        """Report that this process is ready, and wait for the start."""
        self._pipe.send(("ready", None))
        await self._started.wait()
        return self.value

    async def report(self, counters: Counters) -> None:
        """Send the counters regularly."""
        while True:
            await asyncio.sleep(_REPORT_SECONDS)
            self._pipe.send(("counters", counters.as_dict()))

    def _receive(self) -> None:
        try:
            word, self.value = self._pipe.recv()
        except (EOFError, OSError):
            sys.stderr.flush()
            os._exit(1)
        if word == "stop":
            self.stopped.set()
        self._started.set()


def describe(counters: Counters, job: Job) -> Iterator[str]:
    """Yield the lines about a fleet's result."""
    if not counters.connects:
        return
    if counters.published:
        yield f"published {counters.published} messages of {job.plan.nodes} nodes"
    if job.adapter:
        yield f"the adapter stored {counters.adapter_stored} messages and dropped {counters.adapter_dropped}"
    if job.rpc:
        yield f"answered {counters.replies} of {counters.requests} requests"
