"""The members of a soak: two homes of one site, their networks, and the watch on their leases."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import psutil

from sr_assets.adapters.state.lease import Lease
from sr_assets.domain.errors import RunError
from sr_assets.domain.positions import format_rfc3339_ns
from sr_assets.operate.due_work import note_checked
from sr_assets.stages.leadership import campaigns_here, step_down
from sr_assets_bench.comparison.tables import Difference, Kind
from sr_assets_bench.soak.runs import Operator, Progress
from sr_assets_tests.rig import SITE, Rig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sr_assets_bench.soak.partition import Network

_POLL_SECONDS: Final = 0.01
_STEP_DOWN_SECONDS: Final = 30.0
_CLOCK: Final = Path(__file__).parent / "clock"


class Member:
    """One home of the site with its process `sr-assets run --follow`, behind its own networks.

    `clock_seconds` is the error of its clock, `keys` are the top level of its configuration.
    """

    def __init__(
        self, name: str, rig: Rig, networks: dict[str, Network], keys: dict[str, Any], clock_seconds: int
    ) -> None:
        self.name, self.rig, self.networks = name, rig, networks
        self._keys = keys
        environ = {**os.environ, "SR_ASSETS_SOAK_CLOCK": str(clock_seconds), "PYTHONPATH": str(_CLOCK)}
        self.operator = Operator(rig, random.Random(name), modes=("--follow",), environ=environ)
        self._kept = rig.home.with_name(f"{rig.home.name}.kept")
        self.progress = Progress(rig.home)
        self.configure()

    def configure(self) -> None:
        """Write the configuration."""
        self._settings = self.rig.settings(**self._keys)
        note_checked(self.rig.home)

    @property
    def lease(self) -> Lease:
        """The result of its last campaign."""
        return Lease.read(self.rig.home / "sites" / SITE)

    @property
    def stands_by(self) -> bool:
        """Whether a process of its home campaigns."""
        return campaigns_here(self.rig.home / "sites" / SITE)

    def tend(self) -> None:
        """Start its process if it has ended."""
        self.operator.tend()

    def step_down(self) -> None:
        """Give up the leadership, in a thread, as the command `step-down` does."""

        def give_up() -> None:
            try:
                step_down(self._settings, SITE, _STEP_DOWN_SECONDS)
            except RunError as error:
                # A process that is killed at the same time does not respond.
                self.operator.note(str(error))

        threading.Thread(target=give_up, daemon=True).start()

    def freeze(self) -> list[psutil.Process]:
        """Suspend its processes, except the engine; return them."""
        processes = self.operator.processes()
        for process in processes:
            process.suspend()
        return processes

    def keep_home(self) -> None:
        """Keep a copy of the home as it is; its process must have ended."""
        shutil.rmtree(self._kept, ignore_errors=True)
        shutil.copytree(self.rig.home, self._kept, ignore=shutil.ignore_patterns("spark", "runs.log"))

    def put_back_home(self) -> None:
        """Replace the home by the copy."""
        self.delete_home()
        shutil.copytree(self._kept, self.rig.home, dirs_exist_ok=True)

    def delete_home(self) -> None:
        """Delete everything but the engine, the log and the configuration."""
        for path in self.rig.home.iterdir():
            if path.name not in {"spark", "runs.log"}:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.configure()

    @property
    def has_kept_home(self) -> bool:
        """Whether there is a copy of the home."""
        return self._kept.exists()


@dataclass(slots=True)
class Terms:
    """The terms of the members, observed in a thread: `fail_overs` counts each change of the leader.

    `doubles` are the times at which two members held the lease. Both homes are on one machine, so that their deadlines
    have one clock.
    """

    members: Sequence[Member]
    fail_overs: int = 0
    doubles: list[Difference] = field(default_factory=list)
    leader: Member | None = None
    _last: Member | None = None
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        doubled = False
        while not self._ended.wait(_POLL_SECONDS):
            holding = self._holding()
            # The first lease may have ended while the second one was read.
            if len(holding) > 1 and len(self._holding()) > 1:
                if not doubled:
                    names = " and ".join(f"{each.name} ({each.lease.line})" for each in holding)
                    at = format_rfc3339_ns(time.time_ns())
                    self.doubles.append(Difference(Kind.DOUBLE_LEADER, f"{names} lead at {at}"))
                doubled = True
                continue
            doubled = False
            self.leader = holding[0] if holding else None
            if self.leader is not None:
                self.fail_overs += self._last not in (None, self.leader)
                self._last = self.leader

    def _holding(self) -> list[Member]:
        return [member for member in self.members if member.lease.holds]
