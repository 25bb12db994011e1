"""The network of a simulation: channels between processes and servers, and the two clients' ways into it.

`SimLink` replaces the socket of `wire.Connection`, `SimTransport` that of nats-py, whose event loop runs in the thread that
calls it and waits in simulated time. Bytes of one channel keep their order and take a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar
from urllib.parse import ParseResult

import nats.errors
from nats.aio.transport import Transport

from sr_assets.adapters.nats.client import ClientThread, SecuredClient, error_text
from sr_assets.adapters.wire.connection import CLOSED, WireError
from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.errors import TransientError
from sr_assets_tests.sim.server import Server, Session
from sr_assets_tests.sim.world import SECOND_NS, Killed, Process, SimThread, World, current

T = TypeVar("T")
#: A byte's way takes up to this long, in both directions.
_LATENCY_NS: Final = 2_000_000


class Host(Server):
    """A server of a simulation, at an address. `fault` decides what happens to a message of a client."""

    clustered = True

    def __init__(self, world: World, address: str) -> None:
        self.world, self.address = world, address
        #: What its clock is ahead of the world's at first, and what it gains per second.
        self.clock_ns, self.drift = 0, 0.0
        self.up = True
        #: Until when a stream has no leader, by its name: requests about it are lost.
        self.leaderless: dict[str, int] = {}
        #: Until when a deposed leader answers, since when, and the info that it knows, by the stream's name.
        self.deposed: dict[str, tuple[int, int, dict[str, Any]]] = {}
        self.fault: Callable[[Host, Process, str], str | None] = lambda _host, _process, _subject: None
        self.channels: dict[Session, Channel] = {}
        #: What a client has sent since a message of it was delayed, as by a route between servers.
        self._delayed: dict[Session | None, list[tuple[str, str, bytes, bytes]]] = {}
        super().__init__(
            lambda: world.now_ns + self.clock_ns + round((world.now_ns - world.begin_ns) * self.drift),
            lambda at_ns, call: world.call_at(world.now_ns + round((at_ns - self.clock()) / (1 + self.drift)), call),
            address.partition(":")[0],
            seed=world.chance.randrange(1 << 30),
        )

    def create(self, stream: str, **config: Any) -> None:
        """Create a stream with the subjects `<stream>.>`."""
        self._stream_create(stream, {"name": stream, "subjects": [f"{stream}.>"], **config})
        self.deposed.pop(stream, None)

    def depose(self, stream: str, until_ns: int) -> None:
        """Cut a stream's leader off from its replicas, which elect another one after 4 s; the old one answers until a time."""
        since_ns, info = self.world.now_ns, self._stream_info(stream, {})
        self.leaderless[stream] = since_ns + 4 * SECOND_NS
        self.world.call_at(self.leaderless[stream], lambda: self.deposed.update({stream: (until_ns, since_ns, info)}))

    def _stream_info(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        info, silence_ns = super()._stream_info(name, body), SECOND_NS // 10
        if name in self.deposed and self.world.now_ns < self.deposed[name][0]:
            _, since_ns, known = self.deposed[name]
            info, silence_ns = {**known, "ts": info["ts"]}, self.world.now_ns - since_ns
        others = info["config"]["num_replicas"] - 1
        replicas = [{"name": f"replica {number}", "active": silence_ns} for number in range(others)]
        return {**info, "cluster": {**info["cluster"], "replicas": replicas}}

    def publish(self, session: Session | None, subject: str, reply: str, headers: bytes, payload: bytes) -> None:
        """Process a client's message, unless a fault affects it."""
        if session in self._delayed:
            self._delayed[session].append((subject, reply, headers, payload))
            return
        if (
            session
            and self.leaderless
            and self.world.now_ns < max(self.leaderless.get(token, 0) for token in subject.split("."))
        ):
            return
        match self.fault(self, self.channels[session].process, subject) if session else None:
            case "lost":
                return
            case "unanswered":
                # A batch's place is in its reply subject.
                reply = f"unheard.{reply}"
            case "closed":
                self.disconnect(session)
                return
            case "closed after":
                super().publish(session, subject, f"unheard.{reply}", headers, payload)
                self.disconnect(session)
                return
            case "restarted":
                self.restart()
                return
            case "late":
                self._delayed[session] = [(subject, reply, headers, payload)]
                self.world.call_at(self._later_ns(), lambda: self._deliver(session))
                return
            case "answered late" if session:
                self.channels[session].delay(self._later_ns())
        super().publish(session, subject, reply, headers, payload)

    def _later_ns(self) -> int:
        return self.world.now_ns + self.world.chance.choice((1, 4, 9, 15, 25)) * SECOND_NS

    def _deliver(self, session: Session | None) -> None:
        """Process the delayed messages of a client, which may have left."""
        for message in self._delayed.pop(session):
            super().publish(session, *message)

    def disconnect(self, session: Session | None) -> None:
        """Close a client's connection."""
        if session in self.channels:
            self.channels[session].end_from_server()

    def restart(self, *, lost: int = 0) -> None:
        """Close all connections and lose consumers in memory, and the last messages of each stream."""
        for session in [*self.channels]:
            self.disconnect(session)
        for stream in self.streams.values():
            stream.consumers.clear()
            if lost:
                stream.roll_back(max(0, stream.last - lost))


class Channel:
    """A connection of a process to a host. `woken` is called when bytes or the end arrive at the process."""

    def __init__(self, process: Process, host: Host) -> None:
        self.process, self._host, self._world = process, host, process.world
        self.received = bytearray()
        self.ended = False
        self.woken: Callable[[], None] = lambda: None
        self._closed = False
        self._arrives_ns = self._leaves_ns = 0
        self._outgoing: list[bytes] = []
        self.session = Session(host, self._emit, self.end_from_server)
        host.channels[self.session] = self
        process.ends.append(self.abandon)

    def send(self, data: bytes) -> None:
        """Send bytes to the host."""
        if self.process.dead:
            raise Killed
        if not self._closed and not self.ended:
            self._leaves_ns = self._later(self._leaves_ns)
            self._world.call_at(self._leaves_ns, lambda: self._feed(data))

    def take(self) -> bytes:
        """Return the received bytes."""
        if self.process.dead:
            raise Killed
        data = bytes(self.received)
        self.received.clear()
        return data

    def close(self, *, abrupt: bool = False) -> None:
        """Close from the process; sent bytes still arrive, unless it is abrupt."""
        if abrupt:
            self._forget()
        elif not self._closed:
            self._world.call_at(self._later(self._leaves_ns), self._forget)
        self._closed = True

    def abandon(self) -> None:
        """End with its process; what the kernel has taken may still arrive."""
        self.close(abrupt=self._world.chance.random() < 0.5)

    def delay(self, until_ns: int) -> None:
        """Bring the process nothing until a time."""
        self._arrives_ns = max(self._arrives_ns, until_ns)

    def end_from_server(self) -> None:
        """Close from the server: the process learns of it."""
        self._forget()
        self._arrives_ns = self._later(self._arrives_ns)
        self._world.call_at(self._arrives_ns, self._end)

    def _forget(self) -> None:
        self.session.close()
        self._host.channels.pop(self.session, None)

    def _end(self) -> None:
        self.ended = True
        self.woken()

    def _feed(self, data: bytes) -> None:
        if self.session in self._host.sessions:
            self.session.feed(data)

    def _emit(self, data: bytes) -> None:
        if not self._outgoing:
            self._arrives_ns = self._later(self._arrives_ns)
            self._world.call_at(self._arrives_ns, self._flush)
        self._outgoing.append(data)

    def _flush(self) -> None:
        self.received += b"".join(self._outgoing)
        self._outgoing.clear()
        self.woken()

    def _later(self, not_before_ns: int) -> int:
        moment_ns = self._world.chance.randrange(_LATENCY_NS // 10, _LATENCY_NS)
        cut_until_ns = self._world.cuts.get((self.process.name, self._host.address), 0)
        return max(not_before_ns, cut_until_ns, self._world.now_ns + moment_ns)


class Network:
    """The hosts by address."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.hosts: dict[str, Host] = {}

    def host(self, address: str) -> Host:
        """Add a host."""
        self.hosts[address] = Host(self.world, address)
        return self.hosts[address]

    def dial(self, address: str) -> Channel:
        """Connect the acting process to a host; raises WireError."""
        process, host = self.world.process, self.hosts.get(address)
        if process.dead:
            raise Killed
        if host is None or not host.up:
            raise WireError(f"{address}: Connection refused")
        return Channel(process, host)


class SimLink:
    """`wire.connection.Link`: the socket of the platform's own client."""

    network: Network

    def __init__(self, server: str, timeout_seconds: float, *, abrupt: bool = False, vanished_ms: int = 0) -> None:
        self.address, self.host = server, server.rpartition(":")[0]
        self._abrupt, self._timeout_seconds = abrupt, timeout_seconds
        self._channel = self.network.dial(server)
        self._channel.woken = self._wake
        self._waiting: SimThread | None = None
        self.renew_deadline()

    @property
    def login_seconds(self) -> float:
        return (self._deadline_ns - current().now_ns) / SECOND_NS

    def renew_deadline(self) -> None:
        self._deadline_ns = current().now_ns + round(self._timeout_seconds * SECOND_NS)

    def secure(self, context: ssl.SSLContext) -> None:
        raise WireError(f"{self.address}: no TLS in a simulation")

    def await_bytes(self, timeout_seconds: float) -> bool:
        world = current()
        end_ns = world.now_ns + max(0, math.ceil(timeout_seconds * SECOND_NS))
        while not self._channel.received and not self._channel.ended:
            if world.now_ns >= end_ns:
                return False
            self._waiting = world.thread
            world.wait((end_ns - world.now_ns) / SECOND_NS)
            self._waiting = None
        return True

    def await_room(self, timeout_seconds: float) -> bool:
        return True

    def send(self, data: memoryview) -> int:
        if self._channel.ended:
            raise WireError(f"{self.address}: {CLOSED}")
        self._channel.send(bytes(data))
        return len(data)

    def receive(self) -> bytes | None:
        data = self._channel.take()
        if not data and self._channel.ended:
            raise WireError(f"{self.address}: {CLOSED}")
        return data or None

    def close(self) -> None:
        self._channel.close(abrupt=self._abrupt)

    def _wake(self) -> None:
        if self._waiting is not None:
            self._waiting.wake()


class SimTransport(Transport):
    """nats-py's connection."""

    def __init__(self) -> None:
        self._channel: Channel | None = None
        self._arrived: asyncio.Event = asyncio.Event()

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        try:
            self._channel = SimLink.network.dial(uri.netloc.rpartition("@")[2])
        except WireError as error:
            raise ConnectionRefusedError(111, str(error)) from None
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        self._channel.woken = lambda: loop.arrive(self._arrived.set)

    async def connect_tls(self, *_: Any) -> None:
        raise NotImplementedError

    def write(self, payload: bytes) -> None:
        # A killed process ends where it waits: an error here would only be logged.
        if self._channel is not None and not self._channel.ended and not current().process.dead:
            self._channel.send(bytes(payload))

    def writelines(self, payload: list[bytes]) -> None:
        self.write(b"".join(payload))

    async def read(self, buffer_size: int) -> bytes:
        await self._some()
        return self._cut(buffer_size)

    async def readline(self) -> bytes:
        while True:
            await self._some()
            assert self._channel is not None
            end = self._channel.received.find(b"\n") + 1
            if end or self._channel.ended:
                return self._cut(end)
            self._arrived.clear()
            await self._arrived.wait()

    async def drain(self) -> None:
        if self._channel is None or self._channel.ended:
            raise ConnectionResetError(104, CLOSED)

    async def wait_closed(self) -> None:
        return

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def at_eof(self) -> bool:
        return self._channel is None or (self._channel.ended and not self._channel.received)

    def __bool__(self) -> bool:
        return True

    async def _some(self) -> None:
        assert self._channel is not None
        while not self._channel.received and not self._channel.ended:
            self._arrived.clear()
            await self._arrived.wait()

    def _cut(self, count: int) -> bytes:
        assert self._channel is not None
        data = bytes(self._channel.received[:count])
        del self._channel.received[:count]
        return data


def _quiet_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    task = asyncio.Task(work, loop=loop, **options)
    # The tasks of a killed process never end.
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    return task


class SimLoop(asyncio.BaseEventLoop):
    """An event loop that waits in simulated time; it runs only inside `run_until_complete`."""

    def __init__(self, world: World) -> None:
        super().__init__()
        world.ends.append(self._abandon)
        self._selector = self
        self._clock_resolution = 1e-6
        self.set_task_factory(_quiet_task)
        self._waiting: SimThread | None = None
        self._arrivals: list[Callable[[], None]] = []

    def time(self) -> float:
        return current().seconds

    def arrive(self, call: Callable[[], None]) -> None:
        """Let the loop call a function soon."""
        self._arrivals.append(call)
        if self._waiting is not None:
            self._waiting.wake()

    def select(self, timeout: float | None) -> list[Any]:
        """Wait for an arrival, as a selector does."""
        world = current()
        if not self._arrivals and timeout != 0:
            # Meanwhile another thread may run a loop of its own.
            asyncio._set_running_loop(None)
            self._waiting = world.thread
            try:
                world.wait(timeout)
            finally:
                self._waiting = None
                asyncio._set_running_loop(self)
        arrivals, self._arrivals = self._arrivals, []
        for call in arrivals:
            self.call_soon(call)
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody waits in another thread."""

    def _abandon(self) -> None:
        """Close the coroutines that wait in the loop of a killed process."""
        for task in asyncio.all_tasks(self):
            # One that waits once more while it ends raises an error.
            with contextlib.suppress(RuntimeError):
                task.get_coro().close()

    def close(self) -> None:
        self._selector = None  # type: ignore[assignment]
        super().close()

    def __del__(self) -> None:
        """Nor is its loop closed."""


class SimClient(SecuredClient):
    """nats-py's client with the simulated transport."""

    def __init__(self, settings: ClusterSettings) -> None:
        super().__init__(settings)
        self._transport = SimTransport()


class SimClientThread(ClientThread):
    """The thread of a client, whose loop runs in the calling thread."""

    def close(self) -> None:
        loop, client, self._loop, self._client = self._loop, self._client, None, None
        if loop is None:
            return
        if not current().process.dead:
            if client is not None:
                loop.run_until_complete(client.close_soon(1.0))
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()

    @property
    def is_lost(self) -> bool:
        if self._client is not None and self._loop is not None:
            self._loop.run_until_complete(asyncio.sleep(0))
        return super().is_lost

    _loop: SimLoop | None = None

    def _submit(self, work: Coroutine[Any, Any, T], timeout_seconds: float) -> T:
        if self._loop is None:
            self._loop = SimLoop(current())
            self.woken = asyncio.Event()
        try:
            return self._loop.run_until_complete(work)
        except (OSError, TimeoutError, nats.errors.Error) as error:
            raise TransientError(f"{self.settings.label}: {self.complaint or error_text(error)}") from None
