"""The published tables of a measured stream, read once per publication."""

from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

from sr_assets.adapters import times
from sr_assets.adapters.published.reading import open_fleet, read_rows
from sr_assets.domain.errors import RunError
from sr_assets.measure.measured_stream import MeasuredStream


class Published(NamedTuple):
    """The rows of a fleet in one publication, and the time at which a reader saw them (unix ns)."""

    at_ns: int
    #: The stored time of each node's newest message (unix microseconds, rounded down).
    last_seen_us: dict[str, int]
    #: The sequences of the messages in the history.
    history: list[int]
    #: Id, node, event, and times of the event and its publication (unix ns) of each published advisory.
    advisories: list[tuple[str, str, str, int, int]]


class PublishedTables:
    """A reader of the rows of the nodes whose names end in `suffix`."""

    def __init__(self, stream: MeasuredStream, suffix: str, first_sequence: int) -> None:
        self._home = stream.settings.home
        self._names = [stream.entry.name, stream.entry.stream]
        self._suffix, self._first_sequence = suffix, first_sequence
        # The source's clock may be a moment behind ours.
        self._first_date = times.utc_now().date() - timedelta(days=1)
        self._generation: str | None = None

    def poll(self) -> Published | None:
        """Return the rows of a new publication, or None."""
        with suppress(RunError), open_fleet(self._home) as connection:
            ((generation,),) = read_rows(connection, "SELECT generation FROM snapshot_info").values
            if generation == self._generation:
                return None
            of_fleet = [*self._names, self._suffix]
            last = read_rows(
                connection,
                """
                SELECT node, epoch_us(last_seen) FROM node_availability
                WHERE name = ? AND stream = ? AND suffix(node, ?)
                """,
                of_fleet,
            ).values
            history = read_rows(
                connection,
                """
                SELECT sequence FROM node_snapshot_history
                WHERE name = ? AND stream = ? AND suffix(node, ?) AND sequence >= ? AND date >= ?
                """,
                [*of_fleet, self._first_sequence, self._first_date],
            ).values
            advisories = read_rows(
                connection,
                """
                SELECT event_id, node, event, event_ns, epoch_ns(published_at) FROM node_advisories
                WHERE name = ? AND stream = ? AND suffix(node, ?) AND published_at IS NOT NULL
                """,
                of_fleet,
            ).values
            self._generation = generation
            return Published(times.time_ns(), dict(last), [sequence for (sequence,) in history], advisories)
        return None
