"""The rules of a lease, in simulated time: members that are slow, suspended, killed or cut off never lead together."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from sr_assets.adapters.state.lease import Lease
from sr_assets.adapters.state.orders import give_order
from sr_assets.settings import Settings
from sr_assets.stages.campaign import Candidate, election_keys
from sr_assets_tests.members import bucket_config, key_of
from sr_assets_tests.sim.history import BEGIN_NS
from sr_assets_tests.sim.network import Host, Network
from sr_assets_tests.sim.platform import SITE, Home, simulated
from sr_assets_tests.sim.streams import Refusal, Stored, Stream
from sr_assets_tests.sim.world import SECOND_NS, Process, SimExecutor, SimThread, World

TTL_SECONDS = 10.0
FAULTY_SECONDS, QUIET_SECONDS = 300.0, 60.0
STREAMS = ("A", "B")
KEYS = tuple(map(key_of, STREAMS))
BUCKET = "CHORIA_LEADER_ELECTION"
#: What some of the members' messages meet.
FAULTS = (*["freeze"] * 4, *["kill"] * 4, "cut", "lost", "unanswered", "closed after", "restarted")
FAULT_RATE = 0.02


class Election:
    """Three members, a Stream Replicator that wants one of the keys, and an operator who deletes keys and the bucket."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world: World, network: Network, folder: Path) -> None:
        self.world, self.chance = world, world.chance
        self.host = network.host("source:4222")
        self.host.fault = self.meet
        # The margin of a deadline covers a server whose clock is faster by less than a tenth.
        self.host.drift = self.chance.choice((-0.05, 0.08))
        self.make_bucket(BEGIN_NS - 3600 * SECOND_NS)
        self.members = {name: Home(world, folder, name) for name in "abc"}
        self.folders = {name: member.folder / "sites" / SITE for name, member in self.members.items()}
        self.quiet_at = world.seconds + FAULTY_SECONDS
        self.replicator_leads, self.deleted_at = False, 0.0
        self.leader = ""
        self.terms = 0
        self.doubles: list[str] = []
        write = Lease.write

        def write_checked(lease: Lease, folder: Path) -> None:
            write(lease, folder)
            if lease.holds:
                self.check()

        monkeypatch.setattr(Lease, "write", write_checked)

    def run(self) -> None:
        """Let all of them act."""
        for member in self.members.values():
            member.serve(self.settings(member))
        with SimExecutor() as pool:
            for others in [pool.submit(act) for act in (self.replicate, self.operate)]:
                others.result()
        self.world.sleep(QUIET_SECONDS)
        for member in self.members.values():
            member.kill()
            member.bury()

    def settings(self, member: Home) -> Settings:
        """Return the configuration of a member."""
        urls = {"source_url": "nats://source:4222", "target_url": "nats://target:4222"}
        streams = [{"stream": name, "target_stream": name, **urls} for name in STREAMS]
        return member.configure({"name": SITE, "leader_election_name": member.name, "streams": streams})

    def leases(self) -> dict[str, Lease]:
        """Return the members' leases."""
        return {name: Lease.read(folder) for name, folder in self.folders.items()}

    def check(self) -> None:
        """Note whether somebody leads together with another."""
        leaders = [name for name, lease in self.leases().items() if lease.holds]
        leaders += ["replicator"] * self.replicator_leads
        if len(leaders) > 1:
            self.doubles.append(f"{leaders} lead at {self.world.seconds:.3f}")
        if leaders and leaders[0] != self.leader:
            self.leader = leaders[0]
            self.terms += 1

    def make_bucket(self, created_ns: int) -> None:
        """Create the bucket, instead of an earlier one."""
        self.host.streams[f"KV_{BUCKET}"] = Stream(bucket_config(BUCKET, TTL_SECONDS), created_ns)

    def last(self, key: str) -> Stored | None:
        """Return the last message of a key."""
        return self.host.stream(f"KV_{BUCKET}").last_of(f"$KV.{BUCKET}.{key}")

    def write(self, key: str, value: str, expected: int | None = None) -> int | None:
        """Write a key as others do, or delete it by an empty value; return its revision, or None if it is not as expected."""
        headers = b"NATS/1.0\r\n" + (b"" if value else b"KV-Operation: DEL\r\n")
        if expected is not None:
            headers += b"Nats-Expected-Last-Subject-Sequence: %d\r\n" % expected
        stream = self.host.stream(f"KV_{BUCKET}")
        with suppress(Refusal):
            return int(stream.store(f"$KV.{BUCKET}.{key}", headers + b"\r\n", value.encode(), self.host.clock())["seq"])
        return None

    def meet(self, _host: Host, process: Process, _subject: str) -> str | None:
        """Let a message of a member meet a fault: it is lost, or its member suspended, cut off or killed."""
        if process.dead or self.world.seconds >= self.quiet_at or self.chance.random() >= FAULT_RATE:
            return None
        fault = self.chance.choice(FAULTS)
        until_ns = self.world.now_ns + round(self.chance.uniform(0, 3 * TTL_SECONDS) * SECOND_NS)
        if fault == "freeze":
            process.frozen_until_ns = until_ns
        elif fault == "cut":
            self.world.cuts[process.name, self.host.address] = until_ns
        elif fault == "kill":
            SimThread(target=self.kill, args=(self.members[process.name], process), name="kill").start()
            # Before or after the message takes effect.
            return self.chance.choice(("lost", None))
        return fault

    def kill(self, member: Home, process: Process) -> None:
        """Kill a process of a member, and start another one."""
        if not process.dead:
            member.kill()
            member.bury()
            self.world.sleep(self.chance.uniform(0, 2 * TTL_SECONDS))
            member.serve(self.settings(member))

    def replicate(self) -> None:
        """Campaign as a Stream Replicator, which is never suspended, ends now and then, and has no deadline.

        It takes a key although a leader does not know yet that an operator deleted it, so it waits for a TTL after that.
        """
        world, revision = self.world, None
        while world.seconds < self.quiet_at:
            world.sleep(self.chance.uniform(0.25, 0.75))
            if self.replicator_leads:
                revision = self.write(KEYS[0], "replicator", revision)
                self.replicator_leads = revision is not None
            else:
                before = self.last(KEYS[0])
                if (before is None or not before.payload) and world.seconds > self.deleted_at + TTL_SECONDS:
                    revision = self.write(KEYS[0], "replicator", before.sequence if before else 0)
                    self.replicator_leads = True
                    self.check()
            if self.replicator_leads and self.chance.random() < 0.01:
                self.replicator_leads = False
                self.write(KEYS[0], "", revision)
                world.sleep(self.chance.uniform(0, 30))
        self.replicator_leads = False

    def operate(self) -> None:
        """Delete a key or the bucket, or let a member step down."""
        while self.world.seconds < self.quiet_at:
            self.world.sleep(self.chance.uniform(0, 20))
            act = self.chance.choice(("key", "keys", "keys", "bucket", "step down"))
            if act == "step down":
                give_order(self.chance.choice([*self.folders.values()]), "step down")
                continue
            self.deleted_at = self.world.seconds
            if act == "bucket":
                self.make_bucket(self.host.clock())
            for key in {"key": [self.chance.choice(KEYS)], "keys": KEYS}.get(act, ()):
                self.write(key, "")


@pytest.mark.parametrize("seed", (0, 1, 2, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, 8))))
def test_one_member_leads_at_a_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, seed: int
) -> None:
    with simulated(seed, BEGIN_NS, most_steps=300_000) as (world, network):
        election = Election(monkeypatch, world, network, tmp_path)
        world.run(election.run)
        leases = election.leases()
        (leader,) = [name for name, lease in leases.items() if lease.holds]
    assert election.doubles == []
    assert {lease.leader for lease in leases.values()} == {leader}
    assert election.terms > 3
    assert "retrying until it works" not in caplog.text


def test_member_leads_after_a_stream_replicator_has_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with simulated(0, BEGIN_NS) as (world, network):
        election = Election(monkeypatch, world, network, tmp_path)
        election.quiet_at = 0.0

        def campaign() -> None:
            settings = election.settings(election.members["a"])
            election.folders["a"].mkdir(parents=True)
            candidate = Candidate(settings, SITE, election_keys(settings, SITE))
            for value in ("replicator", ""):
                for key in KEYS:
                    election.write(key, value)
                began = world.seconds
                assert not candidate.campaign().holds
            while not candidate.campaign().holds:
                world.sleep(0.05)
            # It renews its key every 0.25 to 0.75 s.
            assert world.seconds > began + 0.75

        world.run(campaign)


@pytest.mark.parametrize("request_number", range(3, 9))
def test_suspended_candidate_does_not_lead_without_its_keys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request_number: int
) -> None:
    with simulated(0, BEGIN_NS) as (world, network):
        election = Election(monkeypatch, world, network, tmp_path)
        election.quiet_at = 0.0
        requests: list[str] = []

        def suspend_holder(_host: Host, process: Process, _subject: str) -> None:
            """Suspend the first member that holds the keys in one of its next requests, and delete the keys."""
            held = election.last(KEYS[1])
            if held and f"instance-{process.name}".encode() in held.headers:
                requests.append(process.name)
                if len(requests) == request_number:
                    process.frozen_until_ns = world.now_ns + 5 * SECOND_NS
                    for key in KEYS:
                        election.write(key, "")

        election.host.fault = suspend_holder
        world.run(election.run)
    assert len(requests) > request_number
    assert election.terms
    assert election.doubles == []
