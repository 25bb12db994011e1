"""The nodes of one process: they connect, register by the plan, and end."""

import asyncio
import contextlib
import ipaddress
import math
import random
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

from sr_assets.adapters import times
from sr_assets.adapters.wire.light import Dialer
from sr_assets.domain.errors import RunError
from sr_assets.embedded.daemons.job import Counters, Job
from sr_assets.embedded.daemons.node import Node, agent_subscriptions

_CONNECTING: Final = 200
_POLL_SECONDS: Final = 0.05
_DRAIN_SECONDS: Final = 30.0
#: A daemon's client tests its connection every two minutes.
_PING_SECONDS: Final = 120.0
#: Nodes vary the time of a registration by at most this share of the interval, and this long.
_JITTER: Final = 0.02
_LONGEST_JITTER_SECONDS: Final = 1.0
#: Ports of one local address are too few for more connections to one server.
_NODES_PER_SOURCE: Final = 20_000


class Gate(Protocol):
    """The common start of all processes of a fleet, and their stop."""

    stopped: asyncio.Event

    async def start(self) -> float:
        """Report that this process is ready; return the fleet's start on the monotonic clock."""
        ...


class Part:
    """Every `processes`-th node of a job, from `index` on, in the running event loop."""

    def __init__(self, job: Job, index: int, counters: Counters, gate: Gate) -> None:
        self.job, self.counters = job, counters
        self.dialer = Dialer(job.cluster)
        self.slots = asyncio.Semaphore(_CONNECTING)
        self.agent_subscriptions = agent_subscriptions(job.agents, job.collectives)
        self.outstanding, self.is_ending = 0, False
        self._index, self._gate = index, gate
        self._sources = _sources(job)
        self._nodes = {sender: Node(self, sender) for sender in job.plan.senders(index, job.processes)}
        self._tasks: set[asyncio.Task[None]] = set()
        self._complaints: set[str] = set()
        self._refused: str | None = None

    async def run(self) -> None:
        """Run until the end of the plan or a stop; raises RunError if the server refuses a permission or messages."""
        tasks: list[asyncio.Task[None]] = []
        try:
            await asyncio.gather(*(node.connect() for node in self._nodes.values()))
            began = await self._gate.start()
            tasks = [asyncio.create_task(self._keep_testing()), *self._schedule_outages(began)]
            await self._follow_plan(began)
            await self._drain()
        finally:
            self.is_ending = True
            for task in [*tasks, *self._tasks]:
                task.cancel()
            for node in self._nodes.values():
                node.disconnect()
        if self._refused is not None:
            raise RunError(f"no fleet at {self.job.cluster.label}: {self._refused}; grant the user that permission")
        if self.outstanding and not self._gate.stopped.is_set():
            raise RunError(
                f"{self.job.cluster.label}: {self.outstanding} messages are not acknowledged {_DRAIN_SECONDS:.0f} s after "
                "the end; check the server and the stream"
            )

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task that ends with the part."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def complain(self, line: str) -> None:
        """Print a problem of a connection, each text once."""
        if line not in self._complaints and not self.is_ending and not self._gate.stopped.is_set():
            self._complaints.add(line)
            print(f"warning: {line}; reconnecting", file=sys.stderr, flush=True)  # noqa: T201  the command's output

    def deny(self, complaint: str, *, is_needed: bool) -> None:
        """Stop if a permission is missing without which nodes cannot work, else ignore it."""
        if is_needed:
            words, quote, subject = complaint.partition('"')
            self._refused = self._refused or words.lower() + quote + subject
            self._gate.stopped.set()

    def source(self, identity: str) -> str | None:
        """Return the local address of a node's connection; a large fleet needs several on the loopback."""
        if len(self._sources) == 1:
            return None
        return self._sources[hash(identity) % len(self._sources)]

    async def _follow_plan(self, began: float) -> None:
        plan, loop = self.job.plan, asyncio.get_running_loop()
        end = math.inf if self.job.for_seconds is None else self.job.for_seconds
        jitter = min(_LONGEST_JITTER_SECONDS, plan.interval_seconds * _JITTER)
        for event in plan.events(times.time(), self._index, self.job.processes):
            if event.at_seconds >= end or not await self._due(began + event.at_seconds):
                break
            node = self._nodes[event.sender]
            loop.call_later(random.random() * jitter, node.register, event.payload)  # noqa: S311  jitter
        await self._due(times.monotonic() + jitter + _POLL_SECONDS)

    async def _due(self, at: float) -> bool:
        """Wait until a time; return False if the fleet was stopped."""
        left = at - times.monotonic()
        if left <= 0:
            # Let connections read and write.
            await asyncio.sleep(0)
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gate.stopped.wait(), left)
        return not self._gate.stopped.is_set()

    async def _drain(self) -> None:
        """Wait until all messages are acknowledged or sent; after a stop, not for those of a lost connection."""
        deadline = times.monotonic() + (2.0 if self._gate.stopped.is_set() else _DRAIN_SECONDS)
        while self._refused is None and times.monotonic() < deadline:
            if not self.outstanding and all(node.is_flushed() for node in self._nodes.values()):
                return
            await asyncio.sleep(_POLL_SECONDS)

    def _schedule_outages(self, began: float) -> list[asyncio.Task[None]]:
        tasks = []
        for window in self.job.plan.windows:
            if window.cut:
                nodes = [node for sender, node in self._nodes.items() if window.concerns(sender)]
                end = began + window.until_seconds
                tasks.append(asyncio.create_task(self._outage(nodes, began + window.from_seconds, end)))
        return tasks

    async def _outage(self, nodes: list[Node], begin: float, end: float) -> None:
        await self._each(nodes, begin, Node.cut)
        if math.isfinite(end):
            await self._each(nodes, end, Node.restore)

    async def _each(self, nodes: list[Node], at: float, action: Callable[[Node], None]) -> None:
        await asyncio.sleep(max(0.0, at - times.monotonic()))
        for node in nodes:
            action(node)

    async def _keep_testing(self) -> None:
        """Ping every node every two minutes, spread over this time."""
        nodes = list(self._nodes.values())
        while True:
            for node in nodes:
                await asyncio.sleep(_PING_SECONDS / len(nodes))
                node.ping()


def _sources(job: Job) -> list[str | None]:
    """Return the local addresses for the fleet's connections: 127.0.0.1 and further ones if the server is on the loopback."""
    host = job.cluster.servers[0].rpartition(":")[0]
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host) in ipaddress.ip_network("127.0.0.0/8")
    except (ValueError, TypeError):
        is_local = False
    count = math.ceil(job.plan.nodes / _NODES_PER_SOURCE) if is_local else 1
    return [f"127.0.0.{number}" for number in range(1, min(count, 250) + 1)] if count > 1 else [None]
