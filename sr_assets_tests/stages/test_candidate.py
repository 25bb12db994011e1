"""The rules of a lease, in simulated time: members that are slow, suspended, killed or cut off never lead together."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sr_assets.adapters.state.orders import give_order
from sr_assets.adapters.wire import WireError
from sr_assets.domain.clusters import ClusterSettings
from sr_assets.stages.campaign import Candidate, Key
from sr_assets.stages.leadership import Leadership
from sr_assets_tests.rig import SITE
from sr_assets_tests.simulated import SimulatedBucket, Store, World

TTL_SECONDS = 10.0
FAULTY_SECONDS, QUIET_SECONDS = 600.0, 60.0
KEYS = ("SR_LONDON_A", "SR_LONDON_B")


class Killed(BaseException):
    """The end of a member's process."""


class Member(Leadership):
    """A home whose process campaigns, ends and starts again."""

    def __init__(self, folder: Path, name: str) -> None:
        keys = [Key(key, name, ClusterSettings(()), "ELECTION") for key in KEYS]
        settings: Any = SimpleNamespace(home=folder / name)
        super().__init__(settings, SITE, keys=keys)

    def live(self, election: Election) -> None:
        """Campaign as a process of the home does, until the world's end."""
        world = election.world
        while world.now < world.end:
            try:
                for pause_seconds in self._campaign_on(self.candidate()):
                    election.check()
                    if world.now >= world.end:
                        return
                    world.sleep(pause_seconds)
            except Killed:
                world.sleep(world.chance.uniform(0, 2 * TTL_SECONDS))

    def candidate(self) -> Candidate:
        """Return the part of a new process in the election."""
        return Candidate(self._settings, SITE, self._keys)

    def step_down(self) -> None:
        """Ask the process to give up its leadership."""
        give_order(self._folder, "step down")

    def _show(self) -> None:
        """Show nothing."""


class Election:
    """Three members, a Stream Replicator that wants one of the keys, and an operator who deletes keys and the bucket."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int) -> None:
        self.world = World(monkeypatch, seed)
        chance = self.world.chance
        # The margin of a deadline covers a server whose clock is faster by less than a tenth.
        self.store = Store(TTL_SECONDS, rate=chance.uniform(0.95, 1.08))
        self.quiet_at = self.world.now + FAULTY_SECONDS
        self.replicator_leads, self.deleted_at = False, 0.0
        self.leader = ""
        self.terms = 0
        monkeypatch.setattr("sr_assets.stages.leadership.random", chance)
        monkeypatch.setattr(
            "sr_assets.stages.campaign.LeaseBucket",
            lambda _cluster, _bucket, instance, _ttl_seconds: SimulatedBucket(self.store, instance, self.request),
        )
        self.members = {name: Member(folder, name) for name in "abc"}

    def run(self) -> None:
        """Let all of them act."""
        bodies = [lambda member=member: member.live(self) for member in self.members.values()]
        self.world.run(FAULTY_SECONDS + QUIET_SECONDS, [*bodies, self.replicate, self.operate])

    def check(self) -> None:
        """Assert that nobody leads together with another."""
        leaders = [name for name, member in self.members.items() if member.lease.holds]
        leaders += ["replicator"] * self.replicator_leads
        assert len(leaders) <= 1, f"{leaders} lead at {self.world.now:.3f}"
        if leaders and leaders[0] != self.leader:
            self.leader = leaders[0]
            self.terms += 1

    def request(self) -> None:
        """Spend the time of a request, in which a member may be suspended, cut off or killed."""
        chance, sleep = self.world.chance, self.world.sleep
        sleep(chance.uniform(0, 0.02))
        if self.world.now < self.quiet_at and chance.random() < 0.004:
            fault = chance.choice(("suspended", "cut off", "killed"))
            if fault == "suspended":
                sleep(chance.uniform(0, 3 * TTL_SECONDS))
            elif fault == "cut off":
                sleep(TTL_SECONDS / 4)
                raise WireError("the server does not respond")
            else:
                raise Killed

    def replicate(self) -> None:
        """Campaign as a Stream Replicator, which is never suspended, ends now and then, and has no deadline.

        It takes a key although a leader does not know yet that an operator deleted it, so it waits for a TTL after that.
        """
        world, store, revision = self.world, self.store, None
        while world.now < self.quiet_at:
            world.sleep(world.chance.uniform(0.25, 0.75))
            if self.replicator_leads:
                revision = store.write(KEYS[0], "replicator", revision, None, deleted=False)
                self.replicator_leads = revision is not None
            else:
                before = store.entries().get(KEYS[0])
                if (before is None or before.deleted) and world.now > self.deleted_at + TTL_SECONDS:
                    expected = before.revision if before else 0
                    revision = store.write(KEYS[0], "replicator", expected, None, deleted=False)
                    self.replicator_leads = True
                    self.check()
            if self.replicator_leads and world.chance.random() < 0.01:
                self.replicator_leads = False
                store.write(KEYS[0], "", revision, None, deleted=True)
                world.sleep(world.chance.uniform(0, 30))
        self.replicator_leads = False

    def operate(self) -> None:
        """Delete a key or the bucket, or let a member step down."""
        world = self.world
        while world.now < self.quiet_at:
            world.sleep(world.chance.uniform(0, 60))
            act = world.chance.choice(("key", "keys", "keys", "bucket", "step down"))
            if act == "step down":
                world.chance.choice(list(self.members.values())).step_down()
                continue
            self.deleted_at = world.now
            if act == "bucket":
                self.store.recreate()
            for key in {"key": [world.chance.choice(KEYS)], "keys": KEYS}.get(act, ()):
                self.store.write(key, "", None, None, deleted=True)


@pytest.mark.parametrize("seed", (0, 1, 2, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, 8))))
def test_one_member_leads_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int) -> None:
    election = Election(monkeypatch, tmp_path, seed)
    election.run()
    leases = {name: member.lease for name, member in election.members.items()}
    (leader,) = [name for name, lease in leases.items() if lease.holds]
    assert {lease.leader for lease in leases.values()} == {leader}
    assert election.terms > 3


def test_member_leads_after_a_stream_replicator_has_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    election = Election(monkeypatch, tmp_path, seed=0)
    election.quiet_at = 0.0
    candidate = election.members["a"].candidate()
    for deleted in (False, True):
        for key in KEYS:
            election.store.write(key, "replicator", None, None, deleted=deleted)
        began = election.world.now
        assert not candidate.campaign().holds
    while not candidate.campaign().holds:
        election.world.sleep(0.05)
    # It renews its key every 0.25 to 0.75 s.
    assert election.world.now > began + 0.75
