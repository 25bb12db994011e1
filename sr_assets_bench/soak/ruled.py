"""Two streams under the rules of operators, on a server of their own: outages, windows, flapping, classes, `retire`.

No fault hits their server, so that a naive fold of their messages gives every announcement; the runs are killed as always.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Self

from sr_assets.adapters.state.operator_settings import add_windows
from sr_assets.adapters.wire import Connection, Outgoing, Publisher
from sr_assets.domain.tracking.maintenance import Window
from sr_assets_tests.reference import SECOND
from sr_assets_tests.rig import SITE, address

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from sr_assets.embedded.nats_server import NatsServer
    from sr_assets_tests.rig import Rig

GUARDED, RULED, RULINGS = "GUARDED", "RULED", "RULINGS"
#: The scenarios repeat in cycles.
_CYCLE_SECONDS: Final = 28.0
_TICK_SECONDS: Final = 0.25
#: A pause between two nodes that are retired by hand, because each command is a process.
_SCRIPT_SECONDS: Final = 60.0
#: The warnings and intervals of the streams and of their classes, in seconds.
DURATIONS: Final[dict[str, tuple[int, int]]] = {
    GUARDED: (2, 6),
    "slow": (8, 40),
    RULED: (1, 30),
    "work": (9, 30),
    "still": (21_600, 43_200),
}
#: The outage guard: shares in percent, then quiet time and hold in seconds, and the smallest site.
PARTIAL, DARK, QUIET_SECONDS, HOLD_SECONDS, MIN_NODES = 50, 80, 1, 6, 6
#: A node flaps with this number of transitions in so many seconds: fewer than the class `work` can have.
FLAPPING: Final = (4, 8)
_WINDOW: Final = (12.0, 21.0)
WINDOW_NODES: Final = "work*"
#: The beginning of the names of the nodes that are retired by hand.
BY_HAND: Final = "still"
_GROUPS: Final[dict[str, tuple[str, ...]]] = {
    GUARDED: (*(f"site{number}" for number in range(10)), "slow0", "slow1"),
    RULED: ("flap0", "flap1", "work0", "work1", "work2"),
}


def class_of(stream: str, node: str) -> str:
    """Return the class of a node, or its stream if it has none; both have `DURATIONS`."""
    return next((name for name in ("slow", "work", BY_HAND) if node.startswith(name)), stream)


def add_ruled_streams(rig: Rig, server: NatsServer) -> None:
    """Create the streams and their targets, and add them to the configuration."""
    rig.create(RULINGS, server, subjects=[f"{RULINGS}.>", "sr_assets.>"])
    rules: dict[str, dict[str, Any]] = {
        GUARDED: {
            "classes": _classes("slow"),
            "outage_guard": {
                "partial": f"{PARTIAL}%",
                "dark": f"{DARK}%",
                "min_nodes": MIN_NODES,
                "quiet": f"{QUIET_SECONDS}s",
                "hold": f"{HOLD_SECONDS}s",
            },
        },
        RULED: {
            "classes": _classes("work", BY_HAND),
            "flapping": {"transitions": FLAPPING[0], "within": f"{FLAPPING[1]}s"},
        },
    }
    for stream, keys in rules.items():
        rig.create(stream, server)
        warning, interval = DURATIONS[stream]
        rig.add(
            stream,
            source_url=server.url,
            inspect_field="sender",
            inspect_duration=f"{interval}s",
            warn_duration=f"{warning}s",
            advisory={"subject": f"{RULINGS}.%s.%v", "reliable": True},
            **keys,
        )


def _classes(*names: str) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "match": f"{name}*",
            "warn_duration": f"{DURATIONS[name][0]}s",
            "inspect_duration": f"{DURATIONS[name][1]}s",
        }
        for name in names
    ]


def _reports(node: str, at: float) -> bool:
    """Return whether a node reports at a time of the cycle, in seconds."""
    number = int(node[-1])
    match node[:-1]:
        case "site":
            # Some fall silent earlier, so that the outage is partial first. The last two return late.
            silent = (6.0 if number < 7 else 7.5), {8: 20.0, 9: 15.5}.get(number, 13.0)
            return not silent[0] <= at < silent[1]
        case "flap":
            return at % 3 < 0.6 if at < 16 else True
        case "work":
            # One returns in the window, one after it, one is always up.
            return number == 2 or not 5.0 <= at < (18.0 if number == 0 else 24.0)
    return True


class Troupe:
    """The nodes of both streams, from threads, and an operator who retires nodes by hand, until `stop` and `finish`.

    `windows` are the maintenance windows as begin and end in unix ns. `retired` has each node that was retired by hand, with
    its role: it is restored, stays retired, or returns. `subject` returns the subject of
    a node of the second stream, which is partitioned. No fault sets the state aside while a command holds `state`.
    """

    def __init__(
        self,
        rig: Rig,
        server: NatsServer,
        chance: random.Random,
        seconds: float,
        subject: Callable[[str, str], str],
    ) -> None:
        self._rig, self._server, self._chance, self._subject = rig, server, chance, subject
        self._began_ns = time.time_ns() + 2 * SECOND
        self.windows = [
            tuple(self._began_ns + round((cycle * _CYCLE_SECONDS + edge) * SECOND) for edge in _WINDOW)
            for cycle in range(int(3 * seconds / _CYCLE_SECONDS) + 2)
        ]
        self.retired: dict[str, str] = {}
        self.complaints: list[str] = []
        self.state = threading.Lock()
        self._ended = threading.Event()
        work: list[Callable[[], None]] = [lambda: self._publish(GUARDED), lambda: self._publish(RULED), self._retire]
        self._threads = [threading.Thread(target=each, daemon=True) for each in work]

    def __enter__(self) -> Self:
        windows = [
            Window(f"soak{number}", (WINDOW_NODES,), begin_ns, end_ns, reason="soak")
            for number, (begin_ns, end_ns) in enumerate(self.windows)
        ]
        add_windows(self._rig.home / "sites" / SITE, windows)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    def stop(self) -> None:
        """Let the nodes fall silent; the operator completes the last commands."""
        self._ended.set()
        for thread in self._threads[:-1]:
            thread.join()

    def finish(self) -> None:
        """Wait for the operator."""
        self._threads[-1].join()

    def _publish(self, stream: str) -> None:
        with Connection(address(self._server), "soak") as connection:
            publisher, number = Publisher(connection), 0
            while not self._ended.wait(_TICK_SECONDS):
                seconds = (time.time_ns() - self._began_ns) / SECOND
                if seconds < 0:
                    continue
                number += 1
                nodes = [node for node in _GROUPS[stream] if _reports(node, seconds % _CYCLE_SECONDS)]
                acks = publisher.publish_all(self._message(stream, node, number) for node in nodes)
                self.complaints += [f"{stream}: {ack.error}" for ack in acks if ack.error]

    def _retire(self) -> None:
        """Retire nodes that reported once: one is restored, one stays retired, one returns."""
        number = 0
        while not self._ended.is_set():
            for role in ("restored", "stays", "returns"):
                node = f"{BY_HAND}-{number}-{role}"
                self._report(node)
                self._command("retire", node, " is already retired since ")
                if role == "restored":
                    self._command("unretire", node, " is not retired but ")
                elif role == "returns":
                    self._report(node)
                self.retired[node] = role
                if self._ended.is_set():
                    return
            number += 1
            self._ended.wait(_SCRIPT_SECONDS)

    def _report(self, node: str) -> None:
        with Connection(address(self._server), "soak") as connection:
            list(Publisher(connection).publish_all([self._message(RULED, node, 1)]))

    def _command(self, action: str, node: str, done: str) -> None:
        """Repeat a command until it has an effect; it is killed now and then, like the runs."""
        environ = {**os.environ, "SR_ASSETS_CONFIG": str(self._rig.home / "replication.yaml")}
        for _ in range(100):
            with self.state:
                process = subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-m", "sr_assets", action, node],
                    env=environ,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                killed = self._chance.random() < 0.2 and not self._ended.is_set()
                try:
                    output = process.communicate(timeout=self._chance.uniform(0.5, 5.0) if killed else None)[0]
                except subprocess.TimeoutExpired:
                    process.kill()
                    output = process.communicate()[0]
            if process.returncode == 0 or done in output:
                return
            if "Traceback" in output:
                self.complaints.append(f"{action} {node}: {output.splitlines()[-1]}")
            time.sleep(_TICK_SECONDS)
        self.complaints.append(f"{action} {node} had no effect: {output}")

    def _message(self, stream: str, node: str, number: int) -> Outgoing:
        subject = self._subject(stream, node) if stream == RULED else f"{stream}.{node}"
        return Outgoing(number, subject, b"", json.dumps({"sender": node}).encode())


def windows_of(troupe: Troupe) -> Iterator[tuple[str, int, int]]:
    """Yield the windows as globs, begins and ends in unix ns."""
    for begin_ns, end_ns in troupe.windows:
        yield WINDOW_NODES, begin_ns, end_ns
