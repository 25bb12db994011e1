"""An emulated fleet: nodes that register periodically, appear, go silent, come back and retire, over real NATS.

`FleetPlan` decides which node publishes when, and is pure: the same plan has the same publications. `Fleet` publishes
them. Not here: the inside of a message (`inventory`), servers (`nats_server`), streams.
"""

import asyncio
import math
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import nats
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.embedded.inventory import Bulk, bulks, registration_message

_ROLES = ("web", "app", "sql", "mem", "log")
_PACKAGES = 20  # of a node that does not grow
_GROWTH_PACKAGES = 15  # a growing node's list grows by this much each round, about 200 bytes …
_GROWTH_ROUNDS = 25  # … and is cut back after so many rounds
_WINDOW_MESSAGES = 256
_ACK_SECONDS = 5.0
_POLL_SECONDS = 0.1  # how late `stop` is noticed


@dataclass(frozen=True, slots=True)
class Churn:
    """How much a fleet changes: the share of nodes that come and go, and how long they are silent between two messages.

    The short silence should lie between the tracker's warning and its interval (timeout, recover), the long one beyond
    the interval (timeout, expire, then new again). Both are rounded up to whole rounds of the fleet, two at least.
    """

    share: float
    short_seconds: float
    long_seconds: float


@dataclass(frozen=True, slots=True)
class Publication:
    """What one node publishes, `at_seconds` after the fleet began."""

    at_seconds: float
    sender: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class _Schedule:
    """The rounds in which a node publishes: from `first` on `on` rounds, then `off` silent ones, and so on; 0 off: all."""

    first: int = 0
    on: int = 1
    off: int = 0

    def publishes(self, round_: int) -> bool:
        since = round_ - self.first
        return since >= 0 and (not self.off or since % (self.on + self.off) < self.on)


@dataclass(frozen=True, slots=True)
class _Node:
    sender: str
    phase_seconds: float
    schedule: _Schedule
    grows: bool
    bulk: Bulk

    def packages(self, round_: int) -> int:
        return _PACKAGES + (_GROWTH_PACKAGES * (round_ % _GROWTH_ROUNDS) if self.grows else 0)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The publications of a fleet: each node publishes once per round of `interval_seconds`, at its own moment in it.

    Of the changing nodes a quarter each appears late, is silent for a short time (again and again), is silent for a long
    time (again and again), stops for good. One node in ten grows its inventory. `payload_bytes` is the typical size: the
    smallest nodes send a third of it, the largest 3.5 times as much.
    """

    nodes: int
    interval_seconds: float
    seed: int = 0
    churn: Churn | None = None
    payload_bytes: int = 7000
    domain: str = "example.net"

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.interval_seconds <= 0:
            raise ConfigurationError(
                f"a fleet of {self.nodes} nodes every {self.interval_seconds} s: both must be more than 0"
            )
        if not 1_000 <= self.payload_bytes <= 250_000:
            raise ConfigurationError(
                f"messages of {self.payload_bytes} bytes: the typical size must be between 1000 and 250000, "
                "so that the largest pass a server's limit of 1 MiB"
            )

    def sender(self, number: int) -> str:
        """The host name of node `number`, from 0."""
        return f"{_ROLES[number % len(_ROLES)]}{number // len(_ROLES) + 1}.{self.domain}"

    def events(self, epoch_seconds: float = 0.0) -> Iterator[Publication]:
        """Yield the publications in order of time, without end; the messages are dated from `epoch_seconds` on."""
        nodes = self._nodes_in_order()
        for round_ in count():
            for node in nodes:
                if node.schedule.publishes(round_):
                    at = round_ * self.interval_seconds + node.phase_seconds
                    yield Publication(
                        at,
                        node.sender,
                        registration_message(
                            node.sender, node.bulk, node.packages(round_), int(epoch_seconds + at), self.seed
                        ),
                    )

    def _nodes_in_order(self) -> list[_Node]:
        """Return all nodes in the order in which they publish within a round."""
        generator = random.Random(f"{self.seed} fleet")
        shared, weights = bulks(self.payload_bytes, self.seed)
        schedules = self._schedules(generator)
        nodes = [
            _Node(self.sender(number), generator.random() * self.interval_seconds, schedule, number % 10 == 3, bulk)
            for number, (schedule, bulk) in enumerate(
                zip(schedules, generator.choices(shared, weights, k=self.nodes), strict=True)
            )
        ]
        return sorted(nodes, key=lambda node: node.phase_seconds)

    def _schedules(self, generator: random.Random) -> list[_Schedule]:
        """Return each node's schedule: every round, and the four that change for random nodes (at least one each)."""
        schedules = [_Schedule()] * self.nodes
        if not self.churn or self.churn.share <= 0:
            return schedules
        short, long = (
            max(1, math.ceil(seconds / self.interval_seconds) - 1)
            for seconds in (self.churn.short_seconds, self.churn.long_seconds)
        )
        changing = min(self.nodes, max(4, round(self.churn.share * self.nodes)))
        for index, number in enumerate(generator.sample(range(self.nodes), changing)):
            on = 2 + index // 4 % 3
            schedules[number] = (
                _Schedule(first=short + on),
                _Schedule(on=on, off=short),
                _Schedule(on=on, off=long),
                _Schedule(on=on, off=1 << 60),
            )[index % 4]
        return schedules


class Fleet:
    """Publishes a plan to a JetStream subject (`%s` becomes the sender), each message until it is acknowledged.

    `run()` publishes from this thread, `start()` from one of its own; both end after `for_seconds` of the plan or when
    `stop()` is called, with everything sent acknowledged. `paced=False` ignores the clock and publishes as fast as the
    server acknowledges. Raises RunError when no server answers or no stream takes the subject.
    """

    def __init__(
        self, plan: FleetPlan, url: str, subject: str, *, for_seconds: float | None = None, paced: bool = True
    ) -> None:
        self.plan = plan
        self.published = 0
        self.retried = 0
        self._servers = url.split(",")
        self._subject = subject
        self._for_seconds = math.inf if for_seconds is None else for_seconds
        self._paced = paced
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def run(self) -> int:
        """Publish until the end and return how many messages were acknowledged."""
        asyncio.run(self._run())
        return self.published

    def start(self) -> Self:
        """Publish from a thread; an error there is raised by `stop()`."""
        self._thread = threading.Thread(target=self._run_in_thread, name="fleet", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the fleet and wait for it; calling again is harmless."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run_in_thread(self) -> None:
        try:
            self.run()
        except Exception as error:  # noqa: BLE001  # raised by `stop` in the caller's thread
            self._error = error

    async def _run(self) -> None:
        client = await self._connect()
        try:
            await self._publish_plan(client.jetstream(timeout=_ACK_SECONDS))
        finally:
            await client.close()

    async def _connect(self) -> Client:
        """Connect: the first attempt may fail, later the client reconnects for as long as it takes."""
        servers = ",".join(urlsplit(server).netloc.rpartition("@")[2] or server for server in self._servers)
        try:
            probe = await nats.connect(
                self._servers, max_reconnect_attempts=1, reconnect_time_wait=0.1, error_cb=_ignore
            )
            try:
                await probe.jetstream().find_stream_name_by_subject(self._subject.replace("%s", "*"))
            finally:
                await probe.close()
            return await nats.connect(self._servers, max_reconnect_attempts=-1, reconnect_time_wait=1, error_cb=_ignore)
        except NotFoundError:
            raise RunError(f"no stream at {servers} takes {self._subject}; create one that does") from None
        except (OSError, NatsError) as error:
            reason = str(error) or type(error).__name__
            raise RunError(f"no fleet at {servers}: {reason}; is a NATS server with JetStream running there?") from None

    async def _publish_plan(self, stream: JetStreamContext) -> None:
        began, window = time.monotonic(), asyncio.Semaphore(_WINDOW_MESSAGES)
        async with asyncio.TaskGroup() as tasks:
            for publication in self.plan.events(time.time()):
                if publication.at_seconds >= self._for_seconds or not await self._due(began + publication.at_seconds):
                    break
                await window.acquire()
                tasks.create_task(self._publish(stream, publication, window))

    async def _due(self, at: float) -> bool:
        """Wait until the time `at`; False when the fleet was stopped meanwhile."""
        # Short sleeps, because `stop` is called from another thread.
        while self._paced and not self._stop.is_set() and (left := at - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(min(left, _POLL_SECONDS))
        return not self._stop.is_set()

    async def _publish(self, stream: JetStreamContext, publication: Publication, window: asyncio.Semaphore) -> None:
        """Publish until acknowledged or stopped; a repeat may store the message twice, as a node's own repeat would."""
        subject = self._subject.replace("%s", publication.sender)
        try:
            while True:
                try:
                    await stream.publish(subject, publication.payload)
                except NatsError:
                    self.retried += 1
                    if self._stop.is_set():
                        return
                    await asyncio.sleep(_POLL_SECONDS)
                else:
                    self.published += 1
                    return
        finally:
            window.release()


async def _ignore(_error: Exception) -> None:
    """Ignore an error of the client: a failed publish is raised where it is awaited, and tried again there."""
