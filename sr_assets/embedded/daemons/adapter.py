"""Choria's protocol adapter: takes daemons' requests from a subject without JetStream, and stores their data in a stream."""

import asyncio
import secrets
from typing import Final, Self

from sr_assets.adapters import times
from sr_assets.adapters.wire.connection import WireError
from sr_assets.adapters.wire.frames import Frame, encode_pub
from sr_assets.adapters.wire.light import Dialer, LightConnection
from sr_assets.adapters.wire.publishing import parse_ack
from sr_assets.domain.errors import RunError
from sr_assets.embedded.choria_rpc import adapter_output
from sr_assets.embedded.daemons.job import Counters, Job

_QUEUE_GROUP: Final = "nats_ingest_sr_assets_emulate"
#: As in Choria: a full queue drops messages, so that a slow stream does not make the server close the connection.
_MAX_QUEUED: Final = 1000
_ACK_SECONDS: Final = 5.0
_RECONNECT_SECONDS: Final = 0.5


class Adapter:
    """The adapter of a fleet, in the running event loop; the stored messages have no headers, as Choria's have none."""

    def __init__(self, job: Job, counters: Counters) -> None:
        self._job, self._counters = job, counters
        self._dialer = Dialer(job.cluster)
        self._link: LightConnection | None = None
        self._inbox = b""
        self._numbers = 0
        self._in_flight: dict[bytes, float] = {}
        self._lost = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        #: The first complaint about a missing permission.
        self.refused: str | None = None

    async def __aenter__(self) -> Self:
        """Connect and subscribe; raises RunError if that is impossible."""
        try:
            await self._connect()
        except WireError as error:
            raise RunError(f"no adapter at {error}") from None
        if self.refused is not None:
            label = self._job.cluster.label
            raise RunError(f"no adapter at {label}: {self.refused}; grant the user that permission")
        self._keeper = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
        if self._link is not None:
            self._link.close()

    @property
    def is_idle(self) -> bool:
        """Whether every stored message is acknowledged."""
        return not self._in_flight

    async def _connect(self) -> None:
        prefix = self._dialer.login.inbox_prefix.encode()
        self._inbox = b"%b.%b." % (prefix, secrets.token_hex(8).encode())
        subscriptions = b"SUB %b* 1\r\nSUB %b %b 2\r\n" % (
            self._inbox,
            self._job.ingest.encode(),
            _QUEUE_GROUP.encode(),
        )
        self._lost.clear()
        try:
            self._link = await self._dialer.open(self, "choria adapter sr-assets", subscriptions)
        except WireError:
            # `_keep` tries again.
            self._lost.set()
            raise

    async def _keep(self) -> None:
        """Reconnect after a loss, and give up messages without an acknowledgement."""
        while True:
            try:
                await asyncio.wait_for(self._lost.wait(), 1.0)
                await asyncio.sleep(_RECONNECT_SECONDS)
                await self._connect()
            except (TimeoutError, WireError):
                pass
            oldest = times.monotonic() - _ACK_SECONDS
            for inbox in [inbox for inbox, sent in self._in_flight.items() if sent < oldest]:
                del self._in_flight[inbox]
                self._counters.adapter_dropped += 1

    def received(self, link: LightConnection, frame: Frame) -> None:
        """Take an acknowledgement or a request."""
        if frame.subject.startswith(self._inbox):
            if self._in_flight.pop(frame.subject, None) is not None:
                if parse_ack(0, frame).error is None:
                    self._counters.adapter_stored += 1
                else:
                    self._counters.adapter_dropped += 1
            return
        self._counters.adapter_received += 1
        stored = adapter_output(frame.payload)
        if stored is None or len(self._in_flight) >= _MAX_QUEUED:
            self._counters.adapter_dropped += 1
            return
        sender, payload = stored
        self._numbers += 1
        inbox = b"%b%d" % (self._inbox, self._numbers)
        self._in_flight[inbox] = times.monotonic()
        try:
            link.send(encode_pub(self._job.subject.replace("%s", sender), inbox, b"", payload))
        except ValueError:
            del self._in_flight[inbox]
            self._counters.adapter_dropped += 1

    def denied(self, complaint: str) -> None:
        """Note it; a message that may not be published is counted as dropped."""
        self.refused = self.refused or complaint

    def lost(self, reason: str) -> None:  # noqa: ARG002  the interface of an owner
        """Reconnect soon."""
        self._link = None
        self._lost.set()
