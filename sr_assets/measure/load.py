"""The messages of an emulated fleet during a measurement, and the wait for their way through a run."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import takewhile
from typing import Final

from sr_assets.adapters import times
from sr_assets.adapters.wire import Connection, Outgoing, Publisher, WireError
from sr_assets.domain.errors import RunError
from sr_assets.embedded.emulator import Fleet
from sr_assets.embedded.fleet_plan import FleetPlan
from sr_assets.measure.measured_stream import MeasuredStream

_POLL_SECONDS: Final = 0.05
#: A server that does not respond for this time ends a measurement.
_UNREACHABLE_SECONDS: Final = 15.0
_STALLED_SECONDS: Final = 60.0


@contextmanager
def publishing(stream: MeasuredStream, plan: FleetPlan, for_seconds: float | None) -> Iterator[Future[int]]:
    """Publish a plan inside the block over one connection; yield its end, with the number of acknowledged messages."""
    fleet = Fleet(plan, stream.entry.source, stream.subject, for_seconds=for_seconds)
    with ThreadPoolExecutor(1, "fleet") as pool:
        end = pool.submit(fleet.run)
        try:
            yield end
        finally:
            fleet.stop()


def publish_backlog(stream: MeasuredStream, plan: FleetPlan, for_seconds: float) -> int:
    """Publish the messages of a fleet's first `for_seconds` at the server's speed, and return their number.

    Raises RunError if the server refuses one.
    """
    events = takewhile(lambda event: event.at_seconds < for_seconds, plan.events(times.time()))
    items = (
        Outgoing(number, stream.subject.replace("%s", event.sender), b"", event.payload)
        for number, event in enumerate(events, 1)
    )
    published = 0
    with Connection(stream.entry.source, "sr-assets measure") as connection:
        for ack in Publisher(connection).publish_all(items):
            if ack.error:
                raise RunError(f"{stream.entry.source.label}: refused a message of the backlog: {ack.error}")
            published += 1
    return published


def patience_seconds(stream: MeasuredStream) -> float:
    """Return how long nothing new may be found: a run polls a quiet source once per interval of the sensor."""
    return _STALLED_SECONDS + stream.settings.sensor.interval_ns / 1e9


def watch(
    poll: Callable[[], int], has_ended: Callable[[], bool], is_complete: Callable[[], bool], patience: float
) -> None:
    """Poll until the load has ended and everything is found, or until nothing new was found for `patience` seconds.

    `poll` returns the number of items found so far. Raises RunError if a server does not respond for 15 s.
    """
    most = -1
    changed_at = answered_at = times.monotonic()
    while True:
        ended = has_ended()
        try:
            count = poll()
            answered_at = times.monotonic()
        except WireError as error:
            if times.monotonic() - answered_at > _UNREACHABLE_SECONDS:
                raise RunError(f"{error}; no result") from None
            count = most
        complete = is_complete()
        if ended and complete:
            return
        if count > most or complete:
            most, changed_at = count, times.monotonic()
        if times.monotonic() - changed_at > patience:
            return
        times.sleep(_POLL_SECONDS)
