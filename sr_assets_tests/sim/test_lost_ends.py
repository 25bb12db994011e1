"""Targets that lose their end within a batch, as after a power failure, or all messages, or that only seem to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from sr_assets.adapters import crash_points
from sr_assets.adapters.crash_points import Point
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.messages import last_origin
from sr_assets_tests.sim.history import BEGIN_NS
from sr_assets_tests.sim.network import Host, Network
from sr_assets_tests.sim.platform import IN_PROCESS, SITE, Home, install_hook, simulated
from sr_assets_tests.sim.world import SECOND_NS, Process, World

pytestmark = pytest.mark.process

TRACKED: Final = {"inspect_field": "sender", "inspect_duration": "1h"}


class Pair:
    """A source and a target that other writers use too, and the home of a site; batches of one message."""

    def __init__(self, world: World, network: Network, folder: Path, keys: dict[str, Any]) -> None:
        self.world = world
        self.source, self.target = (network.host(f"{name}:4222") for name in ("source", "target"))
        self.source.create("S")
        self.target.create("T", subjects=["T.>", "other.>"])
        self.home = Home(world, folder, "one")
        #: Where the next process is killed.
        self.kill_at: Point | None = None
        install_hook([self.home], self._reach)
        entry = {
            "stream": "S",
            "source_url": "nats://source:4222",
            "target_stream": "T",
            "target_subject_prefix": "T",
            "target_url": "nats://target:4222",
            "batch_messages": 1,
            "on_source_reset": "recopy",
            "on_target_reset": "recopy",
            **keys,
        }
        self.settings = self.home.configure({"name": SITE, "spark": IN_PROCESS, "streams": [entry]})
        self.published = 0

    def publish(self, count: int) -> None:
        """Publish messages of new senders."""
        for _ in range(count):
            self.published += 1
            self.source.publish(None, "S.m", "", b"", json.dumps({"sender": f"n{self.published}"}).encode())

    def run(self) -> str | None:
        """Run the site to the end of its work; return the stream's failure."""
        self.home.start(self.settings)
        self.home.join()
        assert self.home.error is None
        (report,) = self.home.reports.values()
        return report.failure

    def lose_end(self, copy: int, lost: int) -> None:
        """Run until the copy with this number is sent: then the process is killed, and the target loses its last messages."""
        sent = 0

        def fail(_host: Host, _process: Process, subject: str) -> str | None:
            nonlocal sent
            sent += subject.startswith("T.")
            if sent < copy:
                return None
            self.target.fault = untouched
            self.home.kill()
            stream = self.target.streams["T"]
            stream.roll_back(stream.last - lost)
            return "closed"

        untouched, self.target.fault = self.target.fault, fail
        self.home.start(self.settings)
        self.home.join()
        self.home.bury()
        assert sent == copy

    def _reach(self, home: Home, point: Point) -> None:
        if point is self.kill_at:
            self.kill_at = None
            home.kill()

    def copied(self) -> list[int]:
        """Return the sequences of the copies in the order of the target."""
        origins = [last_origin(each.headers) for each in self.target.streams["T"].messages.values()]
        return [origin.sequence for origin in origins if origin]

    def counts(self) -> tuple[int, int, int]:
        """Return the messages that count as copied and as lost, and those in the rows of the gaps."""
        with SiteState(self.home.folder / "sites" / SITE) as store:
            copying = store.load_copying("S")
            ((gaps,),) = store.connection.rows("SELECT coalesce(sum(messages), 0) FROM gaps WHERE reason = 'lost'")
            return copying.copied_messages, copying.lost_messages, gaps


def play(folder: Path, keys: dict[str, Any], history: Callable[[Pair], None]) -> None:
    with simulated(1, BEGIN_NS) as (world, network):
        pair = Pair(world, network, folder, keys)
        try:
            world.run(lambda: history(pair))
        finally:
            crash_points.hook = None


@pytest.mark.parametrize("keys", (TRACKED, {}), ids=("tracked", "plain"))
def test_first_batch_continues_after_the_messages_of_others_were_lost(keys: dict[str, Any], folder: Path) -> None:
    """The state has no copy yet that would reveal the loss."""

    def history(pair: Pair) -> None:
        for _ in range(5):
            pair.target.publish(None, "other.m", "", b"", b"")
        pair.publish(3)
        pair.lose_end(copy=1, lost=2)
        assert pair.run() is None
        assert pair.copied() == [1, 2, 3]

    play(folder, keys, history)


@pytest.mark.parametrize("lost", (2, 3))
def test_lost_copies_of_a_restart_are_sent_again(lost: int, folder: Path) -> None:
    """The target still holds earlier copies with the same sequences."""

    def history(pair: Pair) -> None:
        pair.publish(6)
        assert pair.run() is None
        pair.source.streams["S"].roll_back(3)
        pair.publish(3)
        assert pair.run() is None
        pair.target.streams["T"].roll_back(9 - lost)
        assert pair.run() is None
        assert pair.copied() == [*range(1, 7), 4, 5, 6]
        assert pair.counts() == (9, 0, 0)

    play(folder, TRACKED, history)


def test_deleted_target_gets_the_copies_of_staged_batches(folder: Path) -> None:
    def history(pair: Pair) -> None:
        pair.publish(2)
        pair.kill_at = Point.COMMITTED
        pair.home.start(pair.settings)
        pair.home.join()
        pair.home.bury()
        del pair.target.streams["T"]
        assert pair.run() is None
        assert pair.copied() == [1, 2]

    play(folder, TRACKED, history)


def test_copies_that_both_clusters_have_lost_are_reported(folder: Path) -> None:
    """A batch of the lost source is open, and its target ends before the batch began."""

    def history(pair: Pair) -> None:
        pair.publish(6)
        assert pair.run() is None
        # Of the new messages 4, 5 and 6, the first two are copied, then the second copy is lost.
        pair.source.streams["S"].roll_back(3)
        pair.publish(3)
        pair.lose_end(copy=3, lost=1)
        assert pair.copied() == [*range(1, 7), 4]
        pair.source.streams["S"].roll_back(3)
        pair.publish(1)
        assert pair.run() is None
        assert pair.copied() == [*range(1, 7), 4, 4]
        assert pair.counts() == (8, 2, 2)

    play(folder, TRACKED, history)


@pytest.mark.parametrize(
    ("killed_at", "made"), ((Point.PLANNED, []), (Point.PUBLISHED, [3])), ids=("planned", "published")
)
def test_copies_that_wait_to_be_sent_again_are_lost_with_their_source(
    killed_at: Point, made: list[int], folder: Path
) -> None:
    def history(pair: Pair) -> None:
        pair.publish(4)
        assert pair.run() is None
        stream = pair.target.streams["T"]
        stream.roll_back(stream.last - 2)
        # The process is killed in the resend of 3, before its commit.
        pair.kill_at = killed_at
        pair.home.start(pair.settings)
        pair.home.join()
        pair.home.bury()
        assert pair.copied() == [1, 2, *made]
        pair.source.streams["S"].roll_back(2)
        pair.publish(1)
        assert pair.run() is None
        assert pair.copied() == [1, 2, *made, 3]
        assert pair.counts() == (3 + len(made), 2 - len(made), 2 - len(made))

    play(folder, TRACKED, history)


@pytest.mark.parametrize("lost", ("source", "target"))
def test_leader_without_its_replicas_proves_no_loss(lost: str, folder: Path) -> None:
    """It still answers with its end, after another leader has stored messages, which were read or copied."""

    def history(pair: Pair) -> None:
        host, stream = (pair.source, "S") if lost == "source" else (pair.target, "T")
        host.streams[stream].config["num_replicas"] = 3
        pair.publish(3)
        assert pair.run() is None
        known, since_ns = host._stream_info(stream, {}), pair.world.now_ns
        pair.world.sleep(10.0)
        pair.publish(3)
        assert pair.run() is None
        host.deposed[stream] = (pair.world.now_ns + 20 * SECOND_NS, since_ns, known)
        assert f"leader {lost} of stream {stream} has lost its replicas" in str(pair.run())
        pair.world.sleep(20.0)
        pair.publish(1)
        assert pair.run() is None
        assert pair.copied() == [*range(1, 8)]
        assert pair.counts() == (7, 0, 0)

    play(folder, {}, history)
