"""Histories of fixed seeds in the gate; `make simulate` runs any others. Each defect that they found has its own history."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from sr_assets.adapters import crash_points
from sr_assets.adapters.crash_points import Point
from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.domain.messages import last_origin
from sr_assets_tests.sim.elections import run_history
from sr_assets_tests.sim.history import BEGIN_NS
from sr_assets_tests.sim.network import Host
from sr_assets_tests.sim.platform import IN_MEMORY, IN_PROCESS, SITE, Home, install_hook, simulated
from sr_assets_tests.sim.world import Process

pytestmark = pytest.mark.process

#: The histories of the gate, in groups that workers share: a minute on two cores.
GROUPS, GROUP = 8, 10
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
    "batch_messages": 4,
    "advisory": {"subject": "FEED.%s.%v", "reliable": True},
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder without a disk."""
    with tempfile.TemporaryDirectory(prefix="simulation-", dir=IN_MEMORY) as made:
        yield Path(made)


@pytest.mark.parametrize("group", range(GROUPS))
def test_histories_end_as_the_rules_demand(group: int, folder: Path) -> None:
    for seed in range(group * GROUP, (group + 1) * GROUP):
        outcome = run_history(seed, folder)
        assert outcome.problem is None, f"make simulate SEED={seed} ARGS='--histories 1': {outcome.problem}"


@pytest.mark.parametrize("seed", (7, 19), ids=("one home", "members"))
def test_a_seed_is_one_history(seed: int, folder: Path) -> None:
    first, second = (run_history(seed, folder) for _ in range(2))
    assert first == second
    assert first.digest


def test_a_history_leaves_no_open_files(tmp_path: Path) -> None:
    faults = run_history(7, tmp_path).faults
    assert any(kind.startswith("kill") for kind in faults)
    opened = []
    for link in Path("/proc/self/fd").iterdir():
        # The listing's own is closed by now.
        with contextlib.suppress(FileNotFoundError):
            opened.append(str(link.readlink()))
    assert [file for file in opened if file.startswith(str(tmp_path))] == []


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

    with simulated(1, BEGIN_NS) as (world, network):
        source, target = (network.host(f"{name}:4222") for name in ("source", "target"))
        for host, name in ((source, "S"), (source, "FEED"), (target, "T")):
            host.create(name, **WINDOW)
            host.fault = lose_first
        home = Home(world, folder, "one")
        install_hook([home])

        def live() -> None:
            for number in range(6):
                source.publish(None, "S.m", "", b"", json.dumps({"sender": f"n{number}"}).encode())
            home.start(home.configure({"name": SITE, "spark": IN_PROCESS, "streams": [ENTRY]}))
            home.join()

        try:
            world.run(live)
        finally:
            crash_points.hook = None
        assert home.error is None
        assert [report.failure for report in home.reports.values()] == [None]
        copies = [last_origin(each.headers) for each in target.streams["T"].messages.values()]
        told = [json.loads(each.payload)["value"] for each in source.streams["FEED"].messages.values()]
    assert not left
    assert [origin and origin.sequence for origin in copies] == [1, 2, 3, 4, 5, 6]
    assert sorted(told) == [f"n{number}" for number in range(6)]


def test_home_that_has_read_nothing_continues_the_epoch_of_a_later_one(folder: Path) -> None:
    """A centre would rank its advisories below those of the home that began in between, and has ended."""

    def kill_first(home: Home, point: Point) -> None:
        if home is homes[0] and point is Point.FOLDING and not told:
            home.kill()

    with simulated(1, BEGIN_NS) as (world, network):
        source, target = (network.host(f"{name}:4222") for name in ("source", "target"))
        for host, name in ((source, "S"), (source, "FEED"), (target, "T")):
            host.create(name, **WINDOW)
        homes, told = [Home(world, folder, name) for name in ("one", "two")], list[tuple[str, int]]()
        install_hook(homes, kill_first)

        def live() -> None:
            for number, home in enumerate((*homes, homes[0])):
                source.publish(None, "S.m", "", b"", json.dumps({"sender": f"n{number}"}).encode())
                world.sleep(60.0)
                home.start(home.configure({"name": SITE, "spark": IN_PROCESS, "streams": [ENTRY]}))
                home.join()
                home.bury()
                bodies = [json.loads(each.payload) for each in source.streams["FEED"].messages.values()]
                told[:] = [(body["value"], body["epoch"]) for body in bodies]

        try:
            world.run(live)
        finally:
            crash_points.hook = None
        with open_fleet(homes[0].folder) as fleet:
            epochs = fleet.execute("SELECT DISTINCT epoch FROM node_advisories").fetchall()
    assert [node for node, _ in told] == ["n0", "n1", "n2"]
    assert epochs == [(epoch,) for epoch in {epoch for _, epoch in told}]


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
    with simulated(1, BEGIN_NS + 123) as (world, network):
        source, target = (network.host(f"{name}:4222") for name in ("source", "target"))
        for host, name in ((source, "S"), (source, "FEED"), (target, "T")):
            host.create(name, **WINDOW)
        home = Home(world, folder, "one")
        install_hook([home])

        def report_and_run(node: str) -> None:
            source.publish(None, "S.m", "", b"", json.dumps({"sender": node}).encode())
            world.sleep(60.0)
            run()

        def run() -> None:
            home.start(home.configure(document))
            home.join()
            assert home.error is None
            assert [report.failure for report in home.reports.values()] == [None]

        def live() -> None:
            for _ in range(1 + sampled):
                report_and_run("n")
            world.sleep(2400.0)
            if later:
                report_and_run(later)
            if later == "m":
                world.sleep(1500.0)
            run()
            for sequence in range(1, 2 + sampled):
                source.streams["S"].remove(sequence)
            shutil.rmtree(home.folder)
            home.folder.mkdir()
            home.recover(home.configure(document))
            home.join()
            assert home.completed
            run()

        document = {"name": SITE, "spark": IN_PROCESS, "streams": [ENTRY]}
        try:
            world.run(live)
        finally:
            crash_points.hook = None
        bodies = [json.loads(each.payload) for each in source.streams["FEED"].messages.values()]
    assert [f"{body['event']} {body['value']}" for body in bodies] == told


@pytest.mark.parametrize("copied", (0, 1))
def test_rebuilt_state_makes_the_copies_that_were_due(copied: int, folder: Path) -> None:
    """A node whose messages all follow the last copy is found again in them; without copies, the queue names them."""
    made = 0

    def refuse(_host: Host, _process: Process, subject: str) -> str | None:
        nonlocal made
        made += subject.startswith("T.")
        return "lost" if subject.startswith("T.") and made > copied else None

    with simulated(1, BEGIN_NS) as (world, network):
        source, target = (network.host(f"{name}:4222") for name in ("source", "target"))
        for host, name in ((source, "S"), (source, "FEED"), (target, "T")):
            host.create(name, **WINDOW)
        home = Home(world, folder, "one")
        install_hook([home])

        def run() -> str | None:
            home.start(settings)
            home.join()
            assert home.error is None
            (report,) = home.reports.values()
            return report.failure

        def live() -> None:
            for node in ("a", "b", "b"):
                source.publish(None, "S.m", "", b"", json.dumps({"sender": node}).encode())
                # The second message of a node comes after its expiry.
                world.sleep(7200.0)
            untouched, target.fault = target.fault, refuse
            assert run()
            home.recover(settings, force=True)
            home.join()
            assert home.completed, home.error
            target.fault = untouched
            assert run() is None

        settings = home.configure({"name": SITE, "spark": IN_PROCESS, "streams": [ENTRY]})
        try:
            world.run(live)
        finally:
            crash_points.hook = None
        copies = [last_origin(each.headers) for each in target.streams["T"].messages.values()]
        bodies = [json.loads(each.payload) for each in source.streams["FEED"].messages.values()]
    assert [origin and origin.sequence for origin in copies] == [1, 2, 3]
    transitions = [(body["value"], body["event"], body["transition"]) for body in bodies]
    assert sorted(transitions) == [
        ("a", "expire", 3),
        ("a", "new", 1),
        ("a", "timeout", 2),
        *(("b", event, number) for event, number in (("expire", 3), ("expire", 6), ("new", 1), ("new", 4))),
        ("b", "timeout", 2),
        ("b", "timeout", 5),
    ]


def test_rebuilt_state_keeps_the_nodes_of_a_lost_source(folder: Path) -> None:
    """No run finds a node again that only messages of a deleted source have named."""
    made = 0

    def refuse(_host: Host, _process: Process, subject: str) -> str | None:
        nonlocal made
        made += subject.startswith("T.")
        return "lost" if subject.startswith("T.") and made > 1 else None

    with simulated(1, BEGIN_NS) as (world, network):
        source, target = (network.host(f"{name}:4222") for name in ("source", "target"))
        for host, name in ((source, "S"), (source, "FEED"), (target, "T")):
            host.create(name, **WINDOW)
        target.fault = refuse
        home = Home(world, folder, "one")
        install_hook([home])

        def report(node: str) -> None:
            source.publish(None, "S.m", "", b"", json.dumps({"sender": node}).encode())
            world.sleep(60.0)

        def live() -> None:
            report("a")
            report("b")
            home.start(settings)
            home.join()
            del source.streams["S"]
            source.create("S")
            report("c")
            home.recover(settings, force=True)
            home.join()
            assert home.completed, home.error

        settings = home.configure({"name": SITE, "spark": IN_PROCESS, "streams": [ENTRY]})
        try:
            world.run(live)
        finally:
            crash_points.hook = None
        with open_fleet(home.folder) as fleet:
            nodes = fleet.execute("SELECT node FROM last_seen_nodes ORDER BY node").fetchall()
    assert nodes == [("a",), ("b",)]
