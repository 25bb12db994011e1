"""Partitioned streams whose senders move to another number of partitions twice: a plain one of their own, and `RULED`.

Source and target of the plain stream are a server without faults, so that each sender's copies must be in order.
"""

from __future__ import annotations

import json
import re
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Self

from sr_assets.adapters.wire import Connection, Outgoing, Publisher
from sr_assets_bench.comparison.streams import held_now
from sr_assets_bench.comparison.tables import Difference, Kind
from sr_assets_bench.soak.ruled import RULED
from sr_assets_tests.naive_rules import misplaced_copies
from sr_assets_tests.reference import by_field
from sr_assets_tests.rig import address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from sr_assets.embedded.nats_server import NatsServer
    from sr_assets_bench.soak.runs import Operator
    from sr_assets_tests.rig import Rig

DIVIDED, COPIES = "DIVIDED", "DIVIDED_COPIES"
#: The number of partitions, one after the other. A smaller one leaves messages that no new lane takes.
_COUNTS: Final = (3, 2, 4)
_NODES: Final = 25
_TICK_SECONDS: Final = 0.1
_ORIGIN: Final = re.compile(rb"\r\nChoria-SR-Source: \S+ (\d+) ")


class DividedStreams:
    """The senders of the plain stream, from a thread, until `stop`; `tend` moves them, and then changes the configuration.

    `configure` writes the configuration of the changed entries.
    """

    def __init__(self, rig: Rig, server: NatsServer, seconds: float, configure: Callable[[], object]) -> None:
        self._rig, self._server, self._configure = rig, server, configure
        self._pause_seconds, self._left = seconds / len(_COUNTS), list(_COUNTS[1:])
        self._count, self._entries = _COUNTS[0], list[dict[str, Any]]()
        self.complaints: list[str] = []
        self._ended, self._published = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._publish, daemon=True)

    def add(self) -> None:
        """Create the plain stream and its target, and add both streams' partitions to the configuration."""
        self._rig.create(DIVIDED, self._server)
        keys = {"target_stream": COPIES, "target_subject_prefix": "copied", "batch_messages": 1_000}
        url = self._server.url
        plain = self._rig.add(DIVIDED, source_url=url, target_url=url, **keys)
        self._entries = [plain, *(entry for entry in self._rig.entries if entry["stream"] == RULED)]
        for entry in self._entries:
            entry["partitions"] = {"count": self._count, "filter": f"{entry['stream']}.{{p}}.>"}

    def subject(self, stream: str, node: str) -> str:
        """Return the present subject of a node in one of the streams."""
        return f"{stream}.{sum(node.encode()) % self._count}.{node}"

    def __enter__(self) -> Self:
        self._move_at = time.monotonic() + self._pause_seconds
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    def tend(self, operator: Operator) -> None:
        """Move the senders if it is time; the next run gets the changed configuration."""
        if self._left and time.monotonic() >= self._move_at:
            self._move_at += self._pause_seconds
            self._count = self._left.pop(0)
            self._published.clear()
            self._published.wait()
            for entry in self._entries:
                entry["partitions"]["count"] = self._count
            self._configure()
            operator.note(f"{self._count} partitions")
            operator.end()

    def stop(self) -> None:
        """Stop publishing."""
        self._ended.set()
        self._thread.join()

    def _publish(self) -> None:
        with Connection(address(self._server), "soak") as connection:
            publisher, turn = Publisher(connection), 0
            while not self._ended.wait(_TICK_SECONDS):
                turn += 1
                acks = publisher.publish_all(
                    Outgoing(
                        turn, self.subject(DIVIDED, node), b"", json.dumps({"sender": node, "turn": turn}).encode()
                    )
                    for node in (f"n{number}" for number in range(_NODES))
                )
                self.complaints += [f"{DIVIDED}: {ack.error}" for ack in acks if ack.error]
                self._published.set()

    def compare(self) -> Iterator[Difference]:
        """Compare the copies of the plain stream, and its rows; the runs have read it to its end."""
        originals = [(each.sequence, by_field(each) or "") for each in held_now(self._rig, DIVIDED, self._server)]
        copies = [_ORIGIN.findall(copy.headers) for copy in self._rig.stored(COPIES, self._server)]
        for problem in misplaced_copies(originals, [int(each[-1]) for each in copies]):
            yield Difference(Kind.RULES_WRONG, f"{DIVIDED}: {problem}")
        row = self._rig.row(f"SELECT * FROM replication WHERE stream = '{DIVIDED}'")
        if (row["copied_messages"], row["lag_messages"], row["gap_messages"]) != (len(originals), 0, 0):
            yield Difference(Kind.ROW_WRONG, f"replication {DIVIDED}: {row}, of {len(originals)} messages")
        lanes = self._rig.rows(f"SELECT * FROM replication_partitions WHERE stream IN ('{DIVIDED}', '{RULED}')")
        if len(lanes) != 2 * _COUNTS[-1] or any(lane["lag_messages"] for lane in lanes):
            yield Difference(Kind.ROW_WRONG, f"replication_partitions: {lanes}")
