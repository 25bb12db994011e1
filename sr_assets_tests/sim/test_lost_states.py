"""Members that lead in turn: after a death before the first checkpoint, one with the state leads, and none yields twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from sr_assets.adapters import crash_points
from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.adapters.state.lease import Lease
from sr_assets.adapters.state.orders import give_order, is_pending
from sr_assets.domain.messages import last_origin
from sr_assets.settings import Settings
from sr_assets.stages.replication.recover import recover_stream
from sr_assets_tests.sim.history import BEGIN_NS
from sr_assets_tests.sim.network import Host, Network
from sr_assets_tests.sim.platform import IN_PROCESS, SITE, Home, install_hook, simulated
from sr_assets_tests.sim.world import SECOND_NS, Process, SimThread, World

pytestmark = pytest.mark.process

WINDOW: Final = {"duplicate_window": 100_000_000}
TRACKED: Final = {
    "inspect_field": "sender",
    "inspect_duration": "1h",
    "advisory": {"subject": "FEED.%s.%v", "reliable": True},
}
NO_STATE: Final = f"there is no state for {SITE}/S, but "
#: Six times the TTL.
MINUTE: Final = 60.0


class Members:
    """The homes of one site: `north` dies before it has stored a checkpoint, the others begin afterwards."""

    def __init__(self, world: World, network: Network, folder: Path, streams: dict[str, dict[str, Any]]) -> None:
        self.world, self.streams = world, streams
        self.source, self.target = (network.host(f"{name}:4222") for name in ("source", "target"))
        self.source.create("FEED", **WINDOW)
        for stream in streams:
            self.source.create(stream)
            self.target.create(f"T_{stream}", **WINDOW)
        self.homes = {name: Home(world, folder, name) for name in ("north", "south", "west")}
        install_hook(list(self.homes.values()))
        #: The members whose processes run, and each leader, once per term.
        self.present = {"north"}
        self.leaders: list[str] = []
        self.published = dict.fromkeys(streams, 0)

    def lose_leader(self) -> None:
        """Let the first member copy five messages, and kill it when it creates the store of checkpoints."""
        north, untouched = self.homes["north"], self.source.fault

        def kill(_host: Host, _process: Process, subject: str) -> str | None:
            if north.is_dead or not subject.startswith("$JS.API.STREAM.CREATE.OBJ_"):
                return None
            self.present.clear()
            north.kill()
            return "closed"

        self.source.fault = kill
        self.publish("S", 5)
        self.work(MINUTE / 2)
        self.source.fault = untouched
        assert self.copied("S") == [1, 2, 3, 4, 5]
        assert north.is_dead
        self.leaders.clear()

    def publish(self, stream: str, count: int) -> None:
        """Publish messages of new senders."""
        for _ in range(count):
            self.published[stream] += 1
            body = {"sender": f"{stream}{self.published[stream]}"}
            self.source.publish(None, f"{stream}.m", "", b"", json.dumps(body).encode())

    def work(self, seconds: float) -> None:
        """Let the present members campaign, and start a run every twelve seconds."""
        end = self.world.seconds + seconds
        while self.world.seconds < end:
            # In one order: a set of texts has another one in each process.
            for home in (self.homes[name] for name in sorted(self.present)):
                home.bury()
                settings = self.settings(home)
                if home.service is None or not home.service.alive:
                    home.serve(settings)
                if home.process is None or not home.process.alive:
                    home.start(settings)
            for _ in range(24):
                self.world.sleep(0.5)
                leading = [name for name, home in self.homes.items() if Lease.read(home.folder / "sites" / SITE).holds]
                if leading and leading != self.leaders[-1:]:
                    self.leaders += leading

    def settings(self, home: Home) -> Settings:
        """Return the settings of a member."""
        entries = [
            {
                "stream": stream,
                "source_url": "nats://source:4222",
                "target_stream": f"T_{stream}",
                "target_subject_prefix": f"T_{stream}",
                "target_url": "nats://target:4222",
                **keys,
            }
            for stream, keys in self.streams.items()
        ]
        return home.configure(
            {"name": SITE, "spark": IN_PROCESS, "streams": entries, "leader_election_name": home.name}
        )

    def failures(self) -> list[str | None]:
        """Return the failure of each stream in the last run of the leader."""
        home = self.homes[self.leaders[-1]]
        home.join()
        assert home.error is None
        return [report.failure for report in home.reports.values()]

    def recover(self) -> str:
        """Run `recover` at the leader, in a process of its own."""
        home, lines = self.homes[self.leaders[-1]], list[str]()
        home.join()
        settings = self.settings(home)
        process = Process(self.world, home.name)
        thread = SimThread(target=lambda: lines.append(recover_stream(settings, settings.streams[0])), process=process)
        thread.start()
        thread.join()
        return lines[0]

    def copied(self, stream: str) -> list[int]:
        """Return the sequences of the copies in the order of the target."""
        origins = [last_origin(each.headers) for each in self.target.streams[f"T_{stream}"].messages.values()]
        return [origin.sequence for origin in origins if origin]

    def announced(self) -> list[str]:
        """Return the nodes of the stored advisories."""
        return [json.loads(each.payload)["value"] for each in self.source.streams["FEED"].messages.values()]


def play(folder: Path, streams: dict[str, dict[str, Any]], history: Callable[[Members], None], seed: int = 1) -> None:
    """Play a history whose leader dies before its first checkpoint."""

    def live() -> None:
        members.lose_leader()
        history(members)

    with simulated(seed, BEGIN_NS, most_steps=1_000_000) as (world, network):
        members = Members(world, network, folder, streams)
        try:
            world.run(live)
        finally:
            crash_points.hook = None


@pytest.mark.parametrize(
    "keys", (pytest.param(TRACKED, id="tracked"), pytest.param({}, id="plain", marks=pytest.mark.nightly))
)
def test_member_with_the_state_leads_when_it_is_back(
    keys: dict[str, Any], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def history(members: Members) -> None:
        members.present = {"south"}
        members.publish("S", 2)
        members.work(MINUTE)
        (failure,) = members.failures()
        assert str(failure).startswith(NO_STATE)
        assert members.leaders == ["south"]
        members.present = {"north", "south"}
        members.work(MINUTE)
        assert members.leaders == ["south", "north"]
        assert members.failures() == [None]
        # The other one has an order from its earlier term, and restores a checkpoint in its next one.
        assert is_pending(members.homes["south"].folder / "sites" / SITE, "yield")
        give_order(members.homes["north"].folder / "sites" / SITE, "step down")
        members.publish("S", 2)
        members.work(MINUTE)
        assert members.leaders == ["south", "north", "south"]
        assert members.failures() == [None]
        assert not is_pending(members.homes["south"].folder / "sites" / SITE, "yield")
        assert members.copied("S") == [*range(1, 10)]
        assert members.announced() == ([f"S{n}" for n in range(1, 10)] if keys else [])

    play(folder, {"S": keys}, history)
    # A run that the step-down interrupts says so too.
    (line,) = [line for line in caplog.messages if "lacks the site's state" in line]
    assert line.startswith(f"{SITE}: this member lacks the site's state and steps down: north on ")


def test_member_takes_no_position_while_its_target_is_unreachable(folder: Path) -> None:
    """It would count as a member with the state, and its checkpoint as a later one."""

    def history(members: Members) -> None:
        members.present = {"south"}
        # From the lease's end on, and during the first runs.
        members.world.cuts["south", members.target.address] = members.world.now_ns + 40 * SECOND_NS
        members.work(MINUTE)
        assert str(members.failures()[0]).startswith(NO_STATE)
        members.present = {"north", "south"}
        members.work(MINUTE)
        assert members.leaders == ["south", "north"]
        assert members.failures() == [None]
        assert members.copied("S") == [1, 2, 3, 4, 5]

    play(folder, {"S": {}}, history)


def test_leader_stays_if_all_members_lack_the_state(folder: Path) -> None:
    def history(members: Members) -> None:
        members.present = {"south", "west"}
        members.work(2 * MINUTE)
        assert sorted(members.leaders) == ["south", "west"]
        (failure,) = members.failures()
        assert str(failure).startswith(NO_STATE)
        assert str(failure).endswith(f"; run `sr-assets recover --stream {SITE}/S`")
        members.work(MINUTE)
        assert members.failures() == [failure]
        assert len(members.leaders) == 2
        assert "continues at 6; 5 copies found" in members.recover()
        members.publish("S", 2)
        members.work(MINUTE)
        assert members.failures() == [None]
        assert len(members.leaders) == 2
        assert members.copied("S") == [*range(1, 8)]
        assert members.announced() == [f"S{n}" for n in range(1, 8)]

    play(folder, {"S": TRACKED}, history)


def test_only_the_member_with_the_state_replaces_two_others(folder: Path) -> None:
    def history(members: Members) -> None:
        members.present = {"south", "west"}
        members.work(2 * MINUTE)
        members.present = {"north", "south", "west"}
        members.work(MINUTE)
        assert sorted(members.leaders[:2]) == ["south", "west"]
        assert members.leaders[2:] == ["north"]
        assert members.failures() == [None]

    # In the world of this seed, the member that yielded first would campaign before the one with the state.
    play(folder, {"S": TRACKED}, history, seed=4)


def test_leader_with_a_working_stream_stays(folder: Path) -> None:
    def history(members: Members) -> None:
        members.present = {"south"}
        members.work(MINUTE / 2)
        members.present = {"north", "south"}
        members.publish("Q", 3)
        members.work(MINUTE)
        assert members.leaders == ["south"]
        refused, works = members.failures()
        assert str(refused).startswith(NO_STATE)
        assert works is None
        assert members.copied("Q") == [1, 2, 3]
        # The checkpoint of this member lacks one of the streams: the next leader continues both from its own state.
        members.publish("S", 2)
        give_order(members.homes["south"].folder / "sites" / SITE, "step down")
        members.work(MINUTE)
        assert members.leaders == ["south", "north"]
        assert members.failures() == [None, None]
        assert members.copied("S") == [*range(1, 8)]
        assert members.copied("Q") == [1, 2, 3]
        assert sorted(members.announced()) == [*(f"Q{n}" for n in range(1, 4)), *(f"S{n}" for n in range(1, 8))]

    play(folder, {"S": TRACKED, "Q": TRACKED}, history)


def test_member_keeps_its_history_that_another_one_has_merged(folder: Path) -> None:
    """The other one's checkpoint calls its files replaced, by a file that this home lacks."""

    def live() -> None:
        # A file that was filled again from one batch's copies has the name of the batch's own.
        for name, batches in (("north", 3), ("south", 1), ("north", 3), ("south", 1)):
            members.present = {name}
            for _ in range(batches):
                members.publish("S", 2)
                members.work(MINUTE / 2)
            members.homes[name].join()
            members.homes[name].kill()
            members.homes[name].bury()

    def publishes() -> bool:
        """North's merged files are not deleted before its readers have others."""
        return members.present != {"north"}

    with simulated(1, BEGIN_NS, most_steps=1_000_000, publishes=publishes) as (world, network):
        members = Members(world, network, folder, {"S": TRACKED})
        try:
            world.run(live)
        finally:
            crash_points.hook = None
    assert members.leaders == ["north", "south", "north", "south"]
    with open_fleet(members.homes["south"].folder) as fleet:
        kept = fleet.execute("SELECT sequence FROM node_snapshot_history ORDER BY sequence").fetchall()
        newest = fleet.execute("SELECT sequence FROM node_snapshots ORDER BY sequence").fetchall()
    assert kept == newest == [(sequence,) for sequence in range(1, 17)]
