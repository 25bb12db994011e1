"""The emulated daemons of one process: each with its connection, reconnects, registrations by the plan, and replies."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import random
import secrets
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

import orjson

from sr_assets.adapters import times
from sr_assets.adapters.wire.connection import WireError
from sr_assets.adapters.wire.frames import Frame, encode_pub
from sr_assets.adapters.wire.light import Dialer, LightConnection
from sr_assets.adapters.wire.publishing import parse_ack
from sr_assets.domain.errors import RunError
from sr_assets.embedded.choria_rpc import (
    agent_subject,
    answer,
    decode_request,
    encode_reply,
    node_subject,
    registration_request,
)
from sr_assets.embedded.daemons.job import Counters, Job

_ACK_SECONDS: Final = 5.0
_AGAIN_SECONDS: Final = 0.1
_MAX_QUEUED: Final = 16
_LONGEST_BACKOFF_SECONDS: Final = 20.0
#: The envelopes around a reply; base64 takes 4 bytes for 3.
_REPLY_BYTES: Final = 2048
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


class Node:
    """A daemon of a `Part`; `is_cut` during an outage of the plan."""

    __slots__ = ("_inbox", "_link", "_part", "_queue", "_sent", "_timer", "_tries", "identity", "is_cut")

    def __init__(self, part: Part, identity: str) -> None:
        self._part, self.identity, self.is_cut = part, identity, False
        self._link: LightConnection | None = None
        self._queue: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._inbox = b""
        self._sent = self._tries = 0

    async def connect(self) -> None:
        """Connect once; after a failure, try again later with back-off."""
        part = self._part
        if self.is_cut or part.is_ending or self._link is not None:
            return
        try:
            async with part.slots:
                turn = random.randrange(len(part.dialer.cluster.servers))  # noqa: S311  the server that comes first
                self._link = await part.dialer.open(
                    self, self.identity, self._subscriptions(), turn, part.source(self.identity)
                )
        except WireError as error:
            part.counters.connect_errors += 1
            part.complain(str(error))
            self._connect_later()
            return
        self._tries = 0
        part.counters.connects += 1
        part.counters.connected += 1
        if self.is_cut or part.is_ending:
            self.disconnect()
        elif self._queue:
            self._send_first()

    def disconnect(self) -> None:
        """Close the connection; a registration that is not acknowledged stays queued."""
        if self._link is not None:
            self._link.close()
            self._link = None
            self._part.counters.connected -= 1
        self._cancel_timer()

    def cut(self) -> None:
        """Begin an outage."""
        self.is_cut = True
        self.disconnect()

    def restore(self) -> None:
        """End an outage: connect with the delay of a daemon that has tried meanwhile."""
        self.is_cut = False
        self._connect_later()

    def register(self, payload: bytes) -> None:
        """Send a registration: once to the adapter if connected, else into the stream until it is acknowledged."""
        part = self._part
        if part.job.adapter:
            if self._link is None:
                part.counters.dropped += 1
                return
            self._link.send(encode_pub(part.job.ingest, b"", b"", registration_request(payload)))
            self._count_published(payload)
            return
        self._queue.append(payload)
        part.outstanding += 1
        if len(self._queue) > _MAX_QUEUED:
            # The first one may be on its way.
            del self._queue[1]
            part.outstanding -= 1
            part.counters.dropped += 1
        if len(self._queue) == 1:
            self._send_first()

    def ping(self) -> None:
        """Test the connection as a daemon's client does."""
        if self._link is not None and not self._link.ping():
            link, self._link = self._link, None
            link.close()
            self._note_lost("no answer to PING")

    def is_flushed(self) -> bool:
        """Return whether the kernel has taken all sent bytes."""
        return self._link is None or self._link.unsent_bytes == 0

    # -------------------------------------------------------------------------------- the owner of a LightConnection

    def received(self, link: LightConnection, frame: Frame) -> None:
        """Take an acknowledgement or a request."""
        if self._inbox and frame.subject.startswith(self._inbox):
            if self._queue and frame.subject == b"%b%d" % (self._inbox, self._sent):
                self._settle(frame)
        elif self._part.job.rpc:
            self._answer(link, frame)

    def denied(self, complaint: str) -> None:
        """Report a missing permission to the fleet, which stops if it cannot work without it."""
        self._part.deny(complaint, is_needed="publish" in complaint.lower() or self._is_own(complaint))

    def lost(self, reason: str) -> None:
        """Reconnect later."""
        self._link = None
        self._note_lost(reason)

    # --------------------------------------------------------------------------------------------------- internals

    def _is_own(self, complaint: str) -> bool:
        return self._part.job.rpc or bool(self._inbox and self._inbox.decode() in complaint)

    def _note_lost(self, reason: str) -> None:
        self._part.counters.connected -= 1
        self._part.counters.disconnects += 1
        self._cancel_timer()
        self._part.complain(reason)
        self._connect_later()

    def _connect_later(self) -> None:
        """Reconnect after Choria's back-off: half a second, growing to 20 s, each varied by half of it."""
        self._tries += 1
        delay = min(_LONGEST_BACKOFF_SECONDS, 0.5 * self._tries) * random.uniform(0.5, 1.5)  # noqa: S311  jitter
        if not self._part.is_ending:
            asyncio.get_running_loop().call_later(delay, lambda: self._part.spawn(self.connect()))

    def _subscriptions(self) -> bytes:
        """Return the SUB frames of a daemon, and one of the inbox if acknowledgements are awaited."""
        part = self._part
        nodes = b"".join(
            b"SUB %b %d\r\n" % (node_subject(collective, self.identity).encode(), number)
            for number, collective in enumerate(part.job.collectives, 2)
        )
        if part.job.adapter:
            return nodes + part.agent_subscriptions
        prefix = part.dialer.login.inbox_prefix.encode()
        self._inbox = b"%b.%b." % (prefix, secrets.token_hex(8).encode())
        return b"SUB %b* 1\r\n%b%b" % (self._inbox, nodes, part.agent_subscriptions)

    def _send_first(self) -> None:
        self._cancel_timer()
        if self._link is None or not self._queue:
            return
        self._sent += 1
        subject = self._part.job.subject.replace("%s", self.identity)
        self._link.send(encode_pub(subject, b"%b%d" % (self._inbox, self._sent), b"", self._queue[0]))
        self._timer = asyncio.get_running_loop().call_later(_ACK_SECONDS, self._send_again)

    def _send_again(self) -> None:
        """Repeat like a node's own: the stream may hold the message twice."""
        self._part.counters.retried += 1
        self._send_first()

    def _settle(self, frame: Frame) -> None:
        self._cancel_timer()
        if parse_ack(0, frame).error is not None:
            self._timer = asyncio.get_running_loop().call_later(_AGAIN_SECONDS, self._send_again)
            return
        self._count_published(self._queue.pop(0))
        self._part.outstanding -= 1
        if self._queue:
            self._send_first()

    def _count_published(self, payload: bytes) -> None:
        self._part.counters.published += 1
        self._part.counters.published_bytes += len(payload)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _answer(self, link: LightConnection, frame: Frame) -> None:
        """Reply to a request for an agent of this node, unless its filter excludes the node."""
        part, subject = self._part, frame.subject.decode()
        agent = subject.rpartition(".")[2] if ".broadcast.agent." in subject else part.job.agents[-1]
        request = decode_request(frame.payload, agent if frame.reply else "")
        part.counters.requests += 1
        if request is None or request.agent not in part.job.agents:
            return
        body = answer(request, (link.max_payload_bytes - _REPLY_BYTES) * 3 // 4)
        reply_to = request.reply_to or frame.reply.decode()
        if body is None or not reply_to or not request.concerns(self.identity, part.job.agents):
            return
        if request.bare:
            told = {"message": "pong"} if body == b"pong" else orjson.loads(body)
            payload = orjson.dumps({"sender": self.identity} | told)
        else:
            payload = encode_reply(request, self.identity, body, int(times.time()))
        link.send(encode_pub(reply_to, b"", b"", payload))
        part.counters.replies += 1


def agent_subscriptions(agents: list[str], collectives: list[str]) -> bytes:
    """Return the SUB frames of the agents, which are the same for all nodes."""
    subjects = [agent_subject(collective, agent) for collective in collectives for agent in agents]
    first = 2 + len(collectives)
    return b"".join(b"SUB %b %d\r\n" % (subject.encode(), first + number) for number, subject in enumerate(subjects))


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
