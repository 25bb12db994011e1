"""An emulated fleet that publishes a plan over real NATS, each message until the server acknowledges it."""

import asyncio
import math
import threading
from types import TracebackType
from typing import Self

import nats
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js import JetStreamContext

from sr_assets.adapters import times
from sr_assets.adapters.jetstream import ApiError
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.nats.client import error_text, secure_options
from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.errors import RunError
from sr_assets.embedded.fleet_plan import FleetPlan, PlannedMessage

_WINDOW_MESSAGES = 256
_ACK_SECONDS = 5.0
_POLL_SECONDS = 0.1  # the longest delay of `stop`


class Fleet:
    """Publishes a plan to a JetStream subject (`%s` becomes the sender), each message until it is acknowledged.

    `run()` publishes from this thread, `start()` from a new one. Both end after `for_seconds` of the plan or after
    `stop()`, when all sent messages are acknowledged. `paced=False` ignores the clock and publishes as fast as the
    server acknowledges. Raises RunError if no server responds, if it refuses the login or the permission, or if no
    stream takes the subject.
    """

    def __init__(
        self,
        plan: FleetPlan,
        cluster: ClusterSettings,
        subject: str,
        *,
        for_seconds: float | None = None,
        paced: bool = True,
    ) -> None:
        self.plan = plan
        self.published = 0
        self.retried = 0
        self._cluster = cluster
        self._subject = subject
        self._for_seconds = math.inf if for_seconds is None else for_seconds
        self._paced = paced
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._refused: str | None = None

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
        """Stop the fleet and wait for its end; repeated calls are harmless."""
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
        await asyncio.to_thread(require_stream, self._cluster, self._subject.replace("%s", self.plan.sender(0)))
        client = await self._connect()
        try:
            await self._publish_plan(client.jetstream(timeout=_ACK_SECONDS))
        finally:
            await client.close()
        if self._refused is not None:
            raise RunError(f"no fleet at {self._cluster.label}: {self._refused}; grant the user that permission")

    async def _connect(self) -> Client:
        """Connect, with endless reconnects."""
        servers = [f"nats://{server}" for server in self._cluster.servers]
        options = secure_options(self._cluster)
        try:
            return await nats.connect(
                servers, max_reconnect_attempts=-1, reconnect_time_wait=1, error_cb=self._note_error, **options
            )
        except (OSError, NatsError) as error:
            raise RunError(f"no fleet at {self._cluster.label}: {error_text(error)}") from None

    async def _note_error(self, error: Exception) -> None:
        """Stop if publishing is not permitted; other failures are raised where the publish is awaited."""
        if "permissions violation for publish" in str(error).lower():
            self._refused = error_text(error)
            self._stop.set()

    async def _publish_plan(self, stream: JetStreamContext) -> None:
        began, window = times.monotonic(), asyncio.Semaphore(_WINDOW_MESSAGES)
        async with asyncio.TaskGroup() as tasks:
            for publication in self.plan.events(times.time()):
                if publication.at_seconds >= self._for_seconds or not await self._due(began + publication.at_seconds):
                    break
                await window.acquire()
                tasks.create_task(self._publish(stream, publication, window))

    async def _due(self, at: float) -> bool:
        """Wait until the time `at`; return False if the fleet was stopped."""
        # Short sleeps, because `stop` is called from another thread.
        while self._paced and not self._stop.is_set() and (left := at - times.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(min(left, _POLL_SECONDS))
        return not self._stop.is_set()

    async def _publish(self, stream: JetStreamContext, publication: PlannedMessage, window: asyncio.Semaphore) -> None:
        """Publish until acknowledged or stopped; like a node's own, a repetition may store the message twice."""
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


def require_stream(cluster: ClusterSettings, subject: str) -> None:
    """Connect once without retries; raises RunError if that fails, or no stream takes the subject."""
    try:
        with Cluster(cluster, "sr-assets emulate") as admin:
            takers = admin.stream_names(subject)
    except ApiError as error:
        raise RunError(f"no fleet at {error}") from None
    except RunError as error:
        raise RunError(f"no fleet at {cluster.label}: {error}") from None
    if not takers:
        raise RunError(f"no stream at {cluster.label} takes {subject}; create one that does")
