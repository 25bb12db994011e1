"""Random faults of a soak with two members: killed, suspended and partitioned leaders, lost homes, buckets and stores."""

from __future__ import annotations

import random
import time
from collections import Counter
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import psutil

from sr_assets.domain.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sr_assets.embedded.nats_server import NatsServer
    from sr_assets_bench.soak.members import Member, Terms
    from sr_assets_bench.soak.partition import Network
    from sr_assets_tests.rig import Rig

#: Seconds between the readiness of both members and a fault, drawn evenly between two bounds.
_PAUSE_SECONDS: Final = (0.2, 3.0)
#: One fault in so many does not wait until the other member stands by.
_IMPATIENT_AMONG: Final = 8
#: A leader that makes no progress, such as one without a target, is struck after this time.
_IDLE_SECONDS: Final = 20.0
#: One fault in so many hits the follower.
_FOLLOWER_AMONG: Final = 8
#: One home in so many is copied after its process was killed.
_KEPT_AMONG: Final = 3
#: Bounds of a suspension and a partition, in TTLs.
_FROZEN_TTLS: Final = (1.1, 3.0)
_CUT_TTLS: Final = (0.5, 3.0)
_RARE: Final = 3
_RARE_WITHIN: Final = (0.1, 0.9)
_FULL_SHARE: Final = 0.05


class MemberFault(StrEnum):
    """The kinds of faults. A killed process is started again, a suspended one continues."""

    KILLED = "member killed"
    FROZEN = "member suspended"
    STEPPED_DOWN = "step-down"
    CUT_SOURCE = "member cut from the source"
    CUT_TARGET = "member cut from the target"
    CUT_BOTH = "member cut from both"
    BUCKET_DELETED = "bucket deleted"
    STORE_FULL = "checkpoint store full"
    HOME_PUT_BACK = "old home put back"
    HOME_DELETED = "home deleted"


_RARE_FAULTS: Final = (
    MemberFault.BUCKET_DELETED,
    MemberFault.STORE_FULL,
    MemberFault.HOME_PUT_BACK,
    MemberFault.HOME_DELETED,
)
#: A killed process needs a long time until it stands by again.
_FREQUENT: Final = (
    MemberFault.KILLED,
    *(2 * (MemberFault.FROZEN, MemberFault.STEPPED_DOWN)),
    *(MemberFault.CUT_SOURCE, MemberFault.CUT_TARGET, MemberFault.CUT_BOTH),
)
_CUTS: Final = {
    MemberFault.CUT_SOURCE: ("source",),
    MemberFault.CUT_TARGET: ("target",),
    MemberFault.CUT_BOTH: ("source", "target"),
}


class MemberGremlin:
    """Causes faults at random times and ends the lasting ones; call `tend` often.

    A fault waits until no other lasts, one member leads and has worked, and mostly until the other stands by. `bucket` has
    the configuration of the election's bucket, and `store` is the stream of the checkpoints.
    """

    def __init__(
        self,
        members: Sequence[Member],
        terms: Terms,
        bucket: dict[str, Any],
        store: str,
        chance: random.Random,
        seconds: float,
    ) -> None:
        self.faults: Counter[str] = Counter()
        self._members, self._terms, self._chance = members, terms, chance
        self._bucket, self._store = bucket, store
        self._ttl_seconds, self._seconds = bucket["max_age"] / 1e9, seconds
        self._rig: Rig = members[0].rig
        self._began_at = self._struck_at = time.monotonic()
        self._strike_at: float | None = None
        self._patient = True
        self._rare = sorted(
            ((number + chance.uniform(*_RARE_WITHIN)) / _RARE * seconds, fault)
            for number in range(_RARE)
            for fault in _RARE_FAULTS
        )
        #: The time and the way to heal each affected member, and the store.
        self._healing: dict[object, tuple[float, Callable[[], object]]] = {}

    def tend(self) -> None:
        """End the faults that are due, and cause the next one if it is due."""
        now = time.monotonic()
        self.heal(until=now)
        leader = self._terms.leader
        if self._strike_at is None:
            if leader is not None and self._is_ready(leader):
                self._strike_at = now + self._chance.uniform(*_PAUSE_SECONDS)
        elif now >= self._strike_at:
            self._strike_at = None
            if leader is not None:
                self._strike(now, leader)

    def heal(self, until: float = float("inf")) -> None:
        """End the faults that are due, or all if no time is given."""
        for place, (when, heal) in list(self._healing.items()):
            if when <= until:
                del self._healing[place]
                heal()

    def _other(self, member: Member) -> Member:
        return self._members[1] if member is self._members[0] else self._members[0]

    def _is_ready(self, leader: Member) -> bool:
        """Return whether the leader has worked since the last fault, and the other member stands by."""
        if self._healing.keys() & set(self._members):
            return False
        if self._patient and not self._other(leader).stands_by:
            return False
        return leader.progress.moved() or time.monotonic() > self._struck_at + _IDLE_SECONDS

    def _note(self, fault: MemberFault, member: Member | None = None, lasting: float = 0.0) -> None:
        self.faults[fault] += 1
        self._struck_at = time.monotonic()
        self._patient = bool(self._chance.randrange(_IMPATIENT_AMONG))
        text = f"{fault}{f' {member.name}' if member else ''}{f' for {lasting:.1f} s' if lasting else ''}"
        for each in self._members:
            each.operator.note(text)
            # The progress before the fault is no progress after it.
            each.progress.moved()

    def _strike(self, now: float, leader: Member) -> None:
        """Cause the rare fault that is due, else a frequent one."""
        if self._rare and now - self._began_at >= self._rare[0][0] and self._strike_rarely(self._rare[0][1]):
            del self._rare[0]
            return
        member = leader if self._chance.randrange(_FOLLOWER_AMONG) else self._other(leader)
        fault = self._chance.choice(_FREQUENT)
        match fault:
            case MemberFault.KILLED:
                self._note(fault, member)
                member.operator.kill_and_wait()
                if not self._chance.randrange(_KEPT_AMONG):
                    member.keep_home()
            case MemberFault.FROZEN:
                lasting = self._ttl_seconds * self._chance.uniform(*_FROZEN_TTLS)
                self._note(fault, member, lasting)
                self._healing[member] = (time.monotonic() + lasting, partial(_resume, member.freeze()))
            case MemberFault.STEPPED_DOWN:
                self._note(fault, member)
                member.step_down()
            case _:
                lasting = self._ttl_seconds * self._chance.uniform(*_CUT_TTLS)
                self._note(fault, member, lasting)
                networks = [member.networks[name] for name in _CUTS[fault]]
                for network in networks:
                    network.cut()
                self._healing[member] = (time.monotonic() + lasting, partial(_heal_networks, networks))

    def _strike_rarely(self, fault: MemberFault) -> bool:
        """Cause a rare fault, unless its object is affected by another, or it would have no effect."""
        member = self._chance.choice(self._members)
        match fault:
            case MemberFault.BUCKET_DELETED:
                self._note(fault)
                for server in self._chance.choice(([self._rig.source], [self._rig.target], self._servers)):
                    self._replace_bucket(server)
                return True
            case MemberFault.STORE_FULL:
                return self._fill_store()
        if not self._has_checkpoint() or (fault is MemberFault.HOME_PUT_BACK and not member.has_kept_home):
            return False
        self._note(fault, member)
        member.operator.kill_and_wait()
        (member.delete_home if fault is MemberFault.HOME_DELETED else member.put_back_home)()
        return True

    @property
    def _servers(self) -> list[NatsServer]:
        return [self._rig.source, self._rig.target]

    def _has_checkpoint(self) -> bool:
        try:
            return self._rig.info(self._store).messages > 0
        except RunError:
            return False

    def _replace_bucket(self, server: NatsServer) -> None:
        """Delete the election's bucket, and create it again as it was."""
        self._rig.api(f"STREAM.DELETE.{self._bucket['name']}", server=server)
        self._rig.api(f"STREAM.CREATE.{self._bucket['name']}", self._bucket, server)

    def _fill_store(self) -> bool:
        if self._store in self._healing or not self._has_checkpoint():
            return False
        lasting = max(2 * self._ttl_seconds, _FULL_SHARE * self._seconds)
        self._note(MemberFault.STORE_FULL, None, lasting)
        self._limit_store(1)
        self._healing[self._store] = (time.monotonic() + lasting, partial(self._limit_store, -1))
        return True

    def _limit_store(self, max_bytes: int) -> None:
        config = {**self._rig.info(self._store).config, "max_bytes": max_bytes}
        answer = self._rig.api(f"STREAM.UPDATE.{self._store}", config)
        assert "error" not in answer, answer


def _resume(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        try:
            process.resume()
        except psutil.NoSuchProcess:
            continue


def _heal_networks(networks: Iterable[Network]) -> None:
    for network in networks:
        network.heal()
