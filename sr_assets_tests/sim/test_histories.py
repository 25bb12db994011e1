"""Histories of fixed seeds in the gate; `make simulate` runs any others. Each defect that they found has its own history."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from sr_assets.adapters import crash_points
from sr_assets.adapters.crash_points import Point
from sr_assets.adapters.published.compaction import describe
from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.domain.messages import last_origin
from sr_assets.settings import Settings
from sr_assets_tests.sim.elections import run_history
from sr_assets_tests.sim.history import BEGIN_NS
from sr_assets_tests.sim.network import Host, Network
from sr_assets_tests.sim.platform import IN_PROCESS, SITE, Home, install_hook, simulated
from sr_assets_tests.sim.world import Process, World

pytestmark = pytest.mark.process

#: The histories of the gate, in groups that workers share: half a minute on two cores.
GROUPS, GROUP = 5, 10
#: Shorter than any pause before a message is sent again, so that no stream recognises a duplicate.
WINDOW = {"duplicate_window": 100_000_000}
ENTRY: Final = {
    "stream": "S",
    "source_url": "nats://source:4222",
    "target_stream": "T",
    "target_subject_prefix": "T",
    "target_url": "nats://target:4222",
    "inspect_field": "sender",
    "inspect_duration": "1h",
    "advisory": {"subject": "FEED.%s.%v", "reliable": True},
    "on_source_reset": "recopy",
    "size_trigger": "10B",
}


class Scene:
    """Homes of a site between the source S and the target T, in a simulated world."""

    def __init__(self, world: World, network: Network, folder: Path, names: tuple[str, ...] = ("one",)) -> None:
        self.world = world
        self.source, self.target = (network.host(f"{name}:4222") for name in ("source", "target"))
        for host, name in ((self.source, "S"), (self.source, "FEED"), (self.target, "T")):
            host.create(name, **WINDOW)
        self.homes = [Home(world, folder, name) for name in names]
        self.home, self.batch_messages, self.publishes = self.homes[0], 4, True
        install_hook(self.homes)

    def report(self, *nodes: str, seconds: float = 0.0, pad: int = 0) -> None:
        """Publish a message of each node, with a pause after each; `pad` makes it larger, in bytes."""
        for node in nodes:
            self.source.publish(None, "S.m", "", b"", json.dumps({"sender": node}).encode() + b" " * pad)
            self.world.sleep(seconds)

    def settings(self, home: Home | None = None) -> Settings:
        """Return the settings of a home."""
        entry = {**ENTRY, "batch_messages": self.batch_messages}
        return (home or self.home).configure({"name": SITE, "spark": IN_PROCESS, "streams": [entry]})

    def run(self, home: Home | None = None) -> str | None:
        """Run the site in a home until all work is done or it is killed; return its failure."""
        acting = home or self.home
        acting.start(self.settings(acting))
        acting.join()
        acting.bury()
        assert acting.error is None
        return next((report.failure for report in acting.reports.values()), None)

    def recover(self, *, force: bool = False) -> None:
        """Recover the home."""
        self.home.recover(self.settings(), force=force)
        self.home.join()
        assert self.home.completed, self.home.error

    def copied(self) -> list[int | None]:
        """Return the source sequences of the copies, in their order."""
        origins = [last_origin(each.headers) for each in self.target.streams["T"].messages.values()]
        return [origin.sequence if origin else None for origin in origins]

    def told(self) -> list[dict[str, Any]]:
        """Return the advisories, in their order."""
        return [json.loads(each.payload) for each in self.source.streams["FEED"].messages.values()]


@contextlib.contextmanager
def played(
    folder: Path, live: Callable[[Scene], None], names: tuple[str, ...] = ("one",), after_ns: int = 0
) -> Iterator[Scene]:
    """Play a history from `after_ns` on, and show what it leaves."""
    with simulated(1, BEGIN_NS + after_ns, publishes=lambda: scene.publishes) as (world, network):
        scene = Scene(world, network, folder, names)
        try:
            world.run(lambda: live(scene))
        finally:
            crash_points.hook = None
        yield scene


class RefusedCopies:
    """A fault: the target refuses all copies but the first ones."""

    def __init__(self, accepted: int) -> None:
        self._left = accepted

    def __call__(self, _host: Host, _process: Process, subject: str) -> str | None:
        if not subject.startswith("T."):
            return None
        self._left -= 1
        return "lost" if self._left < 0 else None


@pytest.mark.parametrize("group", range(GROUPS))
def test_histories_end_as_the_rules_demand(group: int, folder: Path) -> None:
    for seed in range(group * GROUP, (group + 1) * GROUP):
        outcome = run_history(seed, folder)
        assert outcome.problem is None, f"make simulate SEED={seed} ARGS='--histories 1': {outcome.problem}"


@pytest.mark.parametrize(
    "seed", (pytest.param(7, id="one home"), pytest.param(19, id="members", marks=pytest.mark.nightly))
)
def test_a_seed_is_one_history(seed: int, folder: Path) -> None:
    first, second = (run_history(seed, folder) for _ in range(2))
    assert first == second
    assert first.digest


def test_a_history_leaves_no_open_files(folder: Path) -> None:
    faults = run_history(7, folder).faults
    assert any(kind.startswith("kill") for kind in faults)
    opened = []
    for link in Path("/proc/self/fd").iterdir():
        # The listing's own is closed by now.
        with contextlib.suppress(FileNotFoundError):
            opened.append(str(link.readlink()))
    assert [file for file in opened if file.startswith(str(folder))] == []


@pytest.mark.parametrize(
    "unanswered",
    (
        ("T.S.m",),
        ("FEED.new.n4",),
        # The look at what is stored fails too.
        ("FEED.new.n4", "$JS.API.STREAM.INFO.FEED"),
    ),
    ids=" ".join,
)
def test_nothing_is_stored_twice_after_a_lost_acknowledgement(unanswered: tuple[str, ...], folder: Path) -> None:
    """The same run sends it again, after the stream's duplicate window."""
    left = [*unanswered]

    def lose_first(_host: Host, _process: Process, subject: str) -> str | None:
        if left and subject.startswith(left[0]):
            del left[0]
            return "unanswered"
        return None

    def live(scene: Scene) -> None:
        scene.source.fault = scene.target.fault = lose_first
        scene.report(*(f"n{number}" for number in range(6)))
        assert scene.run() is None

    with played(folder, live) as scene:
        assert not left
        assert scene.copied() == [1, 2, 3, 4, 5, 6]
        assert sorted(body["value"] for body in scene.told()) == [f"n{number}" for number in range(6)]


def test_home_that_has_read_nothing_continues_the_epoch_of_a_later_one(folder: Path) -> None:
    """A centre would rank its advisories below those of the home that began in between, and has ended."""

    def live(scene: Scene) -> None:
        first, second = scene.homes

        def kill_first(home: Home, point: Point) -> None:
            if home is first and point is Point.FOLDING and not scene.told():
                home.kill()

        install_hook(scene.homes, kill_first)
        for number, home in enumerate((first, second, first)):
            scene.report(f"n{number}", seconds=60.0)
            assert scene.run(home) is None

    with played(folder, live, names=("one", "two")) as scene:
        told = scene.told()
        with open_fleet(scene.home.folder) as fleet:
            epochs = fleet.execute("SELECT DISTINCT epoch FROM node_advisories").fetchall()
    assert [body["value"] for body in told] == ["n0", "n1", "n2"]
    assert epochs == [(epoch,) for epoch in {body["epoch"] for body in told}]


@pytest.mark.parametrize("sampled", (False, True), ids=("copied", "and sampled"))
@pytest.mark.parametrize(
    ("later", "told"),
    (
        (None, ["new n", "timeout n"]),
        ("n", ["new n", "timeout n", "recover n"]),
        # The copies end between the timeout and the expiry.
        ("m", ["new n", "timeout n", "new m", "expire n"]),
    ),
    ids=("silent", "back", "expired"),
)
def test_recovery_announces_no_silence_twice(later: str | None, told: list[str], sampled: bool, folder: Path) -> None:
    """The source has only the message after the silence left; the copy of the one before names milliseconds, or is none."""

    def live(scene: Scene) -> None:
        for _ in range(1 + sampled):
            scene.report("n", seconds=60.0)
            assert scene.run() is None
        scene.world.sleep(2400.0)
        if later:
            scene.report(later, seconds=60.0)
            assert scene.run() is None
        if later == "m":
            scene.world.sleep(1500.0)
        assert scene.run() is None
        for sequence in range(1, 2 + sampled):
            scene.source.streams["S"].remove(sequence)
        shutil.rmtree(scene.home.folder)
        scene.home.folder.mkdir()
        scene.recover()
        assert scene.run() is None

    with played(folder, live, after_ns=123) as scene:
        assert [f"{body['event']} {body['value']}" for body in scene.told()] == told


def test_recovery_needs_the_advisories_that_a_server_holds(folder: Path) -> None:
    """Without them, it would announce the silence again."""
    closed = list[str]()

    def close_first(_host: Host, _process: Process, subject: str) -> str | None:
        if closed or not subject.startswith("$JS.API.CONSUMER.MSG.NEXT.FEED."):
            return None
        closed.append(subject)
        return "closed"

    def live(scene: Scene) -> None:
        scene.report("n", seconds=2400.0)
        assert scene.run() is None
        shutil.rmtree(scene.home.folder)
        scene.home.folder.mkdir()
        scene.source.fault = close_first
        scene.home.recover(scene.settings())
        scene.home.join()
        assert str(scene.home.error).startswith(f"{SITE}/S: its stored advisories cannot be read: ")
        scene.recover()
        assert scene.run() is None

    with played(folder, live) as scene:
        assert [body["event"] for body in scene.told()] == ["new", "timeout"]
    assert closed


@pytest.mark.parametrize("copied", (0, 1))
def test_rebuilt_state_makes_the_copies_that_were_due(copied: int, folder: Path) -> None:
    """A node whose messages all follow the last copy is found again in them; without copies, the queue names them."""

    def live(scene: Scene) -> None:
        # The second message of a node comes after its expiry.
        scene.report("a", "b", "b", seconds=7200.0)
        untouched, scene.target.fault = scene.target.fault, RefusedCopies(copied)
        assert scene.run()
        scene.recover(force=True)
        scene.target.fault = untouched
        assert scene.run() is None

    with played(folder, live) as scene:
        assert scene.copied() == [1, 2, 3]
        transitions = [(body["value"], body["event"], body["transition"]) for body in scene.told()]
    assert sorted(transitions) == [
        ("a", "expire", 3),
        ("a", "new", 1),
        ("a", "timeout", 2),
        *(("b", event, number) for event, number in (("expire", 3), ("expire", 6), ("new", 1), ("new", 4))),
        ("b", "timeout", 2),
        ("b", "timeout", 5),
    ]


def test_rebuilt_state_dates_no_message_by_a_later_one(folder: Path) -> None:
    """An announced timeout tells a later message, which is read again after those before it."""

    def live(scene: Scene) -> None:
        untouched, scene.target.fault = scene.target.fault, RefusedCopies(1)
        scene.report("n", "n", "n", seconds=1200.0)
        # Its copy is due, and is refused.
        scene.world.sleep(300.0)
        scene.report("n", seconds=2400.0)
        assert scene.run()
        scene.recover(force=True)
        scene.target.fault = untouched
        assert scene.run() is None

    with played(folder, live) as scene:
        assert scene.copied() == [1, 4]
        assert [body["event"] for body in scene.told()] == ["new", "timeout"]


def test_recovery_continues_after_the_events_of_undone_messages(folder: Path) -> None:
    """The source lacks the message that ended a silence, although a run has followed the rollback."""
    before = list[str]()

    def told(scene: Scene) -> list[str]:
        return [f"{body['event']} {body['value']}" for body in scene.told()]

    def live(scene: Scene) -> None:
        scene.report("b", "a", "b", "c", seconds=1.0, pad=10)
        assert scene.run() is None
        untouched, scene.target.fault = scene.target.fault, RefusedCopies(0)
        scene.world.sleep(4200.0)
        scene.report("b", seconds=2100.0)
        assert scene.run()
        scene.report("b")
        assert scene.run()
        scene.target.fault = untouched
        # The run copies the first message again, for its size.
        scene.source.streams["S"].roll_back(3)
        assert scene.run() is None
        before[:] = told(scene)
        shutil.rmtree(scene.home.folder)
        scene.home.folder.mkdir()
        scene.recover()
        scene.report("b")
        assert scene.run() is None

    with played(folder, live) as scene:
        assert scene.copied()[:4] == [1, 2, 4, 1]
        assert before[-1] == "recover b"
        assert told(scene) == before


def test_recovery_announces_no_silence_between_copies(folder: Path) -> None:
    """The source has lost a message between a node's last copy and the first message that is read again."""

    def live(scene: Scene) -> None:
        scene.report("n", seconds=1200.0)
        scene.report("n", "m", seconds=1.0)
        assert scene.run() is None
        scene.world.sleep(1200.0)
        scene.report("n", seconds=2000.0)
        assert scene.run() is None
        for sequence in (1, 2, 3):
            scene.source.streams["S"].remove(sequence)
        shutil.rmtree(scene.home.folder)
        scene.home.folder.mkdir()
        scene.recover()
        assert scene.run() is None

    with played(folder, live) as scene:
        assert scene.copied() == [1, 3]
        assert [f"{body['event']} {body['value']}" for body in scene.told()] == [
            "new n",
            "new m",
            "timeout m",
            "timeout n",
        ]


def test_rebuilt_state_keeps_the_nodes_of_a_lost_source(folder: Path) -> None:
    """No run finds a node again that only messages of a deleted source have named."""

    def live(scene: Scene) -> None:
        scene.target.fault = RefusedCopies(1)
        scene.report("a", "b", seconds=60.0)
        assert scene.run()
        del scene.source.streams["S"]
        scene.source.create("S")
        scene.report("c", seconds=60.0)
        scene.recover(force=True)

    with played(folder, live) as scene, open_fleet(scene.home.folder) as fleet:
        nodes = fleet.execute("SELECT node FROM last_seen_nodes ORDER BY node").fetchall()
    assert nodes == [("a",), ("b",)]


def test_older_state_beside_merged_files_reads_no_row_twice(folder: Path) -> None:
    """The merged file holds rows of files that the older state knows, and rows that it reads again."""
    nodes = list(map(str, range(18)))

    def live(scene: Scene) -> None:
        scene.report(*nodes[:12])
        assert scene.run() is None
        state, copied = scene.home.folder / "sites", folder / "copied"
        shutil.copytree(state, copied)
        scene.report(*nodes[12:16])
        # The tables of the run before name the parts, which stay.
        scene.publishes = False
        assert scene.run() is None
        scene.publishes = True
        assert any(describe(file).level for file in scene.home.folder.rglob("date=*/*.parquet"))
        shutil.rmtree(state)
        copied.rename(state)
        # The run reads other batches than the one before.
        scene.batch_messages = 5
        scene.report(*nodes[16:])
        assert scene.run() is None

    with played(folder, live) as scene, open_fleet(scene.home.folder) as fleet:
        rows = fleet.execute("SELECT node FROM node_snapshot_history ORDER BY sequence").fetchall()
    assert rows == [(node,) for node in nodes]


def test_rolled_back_target_lost_no_copies_of_others(folder: Path) -> None:
    """Between a copy of earlier hours, which the target still holds, and the lost one are messages of others."""

    def live(scene: Scene) -> None:
        scene.report("a", "a")
        assert scene.run() is None
        for _ in range(3):
            scene.target.publish(None, "T.other", "", b"", b"")
        scene.world.sleep(7200.0)
        scene.report("b")
        assert scene.run() is None
        scene.target.streams["T"].roll_back(4)
        scene.report("c")
        assert scene.run() is None

    with played(folder, live) as scene, open_fleet(scene.home.folder) as fleet:
        gaps = fleet.execute("SELECT reason, messages FROM gaps").fetchall()
    assert [sequence for sequence in scene.copied() if sequence] == [1, 3, 4]
    assert gaps == []


def test_copies_of_a_deleted_target_are_no_forgeries(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The target is deleted after its copies were listed, and before they are read."""
    killed, deleted = list[Point](), list[str]()

    def kill_once(home: Home, point: Point) -> None:
        if point is Point.COMMITTING and not killed:
            killed.append(point)
            home.kill()

    def live(scene: Scene) -> None:
        def delete_once(host: Host, _process: Process, subject: str) -> None:
            if subject.startswith("$JS.API.STREAM.MSG.GET.T") and not deleted:
                deleted.append(subject)
                del host.streams["T"]
                host.create("T", **WINDOW)

        install_hook(scene.homes, kill_once)
        scene.report("a", "b", "c")
        scene.run()
        assert scene.copied() == [1, 2, 3]
        scene.target.fault = delete_once
        assert scene.run() is None

    with played(folder, live) as scene:
        assert scene.copied() == [1, 2, 3]
    assert deleted
    assert not [line for line in caplog.messages if "claim to be copies" in line]
