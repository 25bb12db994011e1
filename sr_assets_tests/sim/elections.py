"""Histories of two and three members with different clocks, whose election decides which of them works on the site.

A member's home has a service, which campaigns, and a run every few seconds. A history kills, suspends and cuts off members.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from sr_assets.adapters.crash_points import Point
from sr_assets.domain.election_keys import election_key
from sr_assets.domain.errors import StandbyError
from sr_assets.settings import Settings
from sr_assets_tests.sim.history import Choice, Difference, History, Outcome
from sr_assets_tests.sim.network import Host
from sr_assets_tests.sim.platform import SITE, Home
from sr_assets_tests.sim.world import SECOND_NS, Process

#: How many rounds the members get at the end of a history: a killed leader's keys expire after 10 s.
_LAST_ROUNDS: Final = 12
#: How long the keys of a leader live on after its lease, of a TTL of 10 s.
_MARGIN_SECONDS: Final = 1.0


class ElectedHistory(History):
    """A history of some members; each round takes some seconds."""

    most_steps = 300_000

    def _live(self) -> None:
        plan = self.plan
        drawn = plan.choice((2, 2, 3))
        self._found(["north", "south", "west"][: self.choice.members or drawn])
        for home in self.homes:
            home.clock_ns = plan.choice((0, -20, 20)) * 60 * SECOND_NS
        self.tracked, self.minutes, self.senders = True, 2, plan.choice((3, 20))
        self.first_rules = self._rules()
        self._draw_centre(0.5)
        self.short_window = plan.random() < 0.5
        window = {"duplicate_window": 100_000_000 if self.short_window else 120 * SECOND_NS}
        self.source.create("S", allow_direct=plan.random() < 0.8)
        self.source.create("FEED", **window)
        self.target.create("T", **window)
        #: When a killed member starts again.
        self.back_ns = dict.fromkeys((home.name for home in self.homes), 0)
        self.publishes = plan.random() < 0.25
        #: The chance that a member is suspended at a request or a point.
        self.suspends = 0.0
        self._publish()
        for _ in range(plan.randrange(8, 16)):
            for _ in range(plan.choice((0, 1, 3, 9))):
                self._publish()
            self._disturb(self._victim())
            self.rates = plan.choice(((0.0, 0.0), (0.0, 0.03), (0.005, 0.0)))
            self.suspends = plan.choice((0.0, 0.0, 0.01))
            self._round()
        self.rates, self.suspends = (0.0, 0.0), 0.0
        self._end()

    def _round(self) -> None:
        """Let every member that is not away work for some seconds."""
        for home in self.homes:
            if home.is_dead:
                self.back_ns[home.name] = (
                    self.back_ns[home.name] or self.world.now_ns + self.luck.choice((0, 5, 25)) * SECOND_NS
                )
                if self.world.now_ns < self.back_ns[home.name]:
                    continue
                home.bury()
                self.back_ns[home.name] = 0
            settings = self._member(home)
            if home.service is None or not home.service.alive:
                home.serve(settings)
            if home.process is None or not home.process.alive:
                home.start(settings)
        self.world.sleep(self.plan.choice((3.0, 6.0, 12.0)))

    def _victim(self) -> Home:
        """Return a member, mostly the leader."""
        leaders = [home for home in self.homes if home.lease.holds and not home.is_dead]
        return self.luck.choice(leaders or self.homes) if self.luck.random() < 0.8 else self.luck.choice(self.homes)

    def _events(self, home: Home) -> dict[str, Callable[[], None]]:
        events = {"member killed": home.kill, "member suspended": lambda: self._freeze(home)}
        events |= {"bucket deleted": self._delete_bucket, "key deleted": self._delete_key}
        return {**super()._events(home), **events}

    def _freeze(self, home: Home) -> None:
        until_ns = self._later_ns()
        for process in filter(None, (home.process, home.service)):
            process.frozen_until_ns = until_ns

    def _delete_bucket(self) -> None:
        """Delete the bucket of the elections: the members create it again."""
        self.source.streams.pop("KV_CHORIA_LEADER_ELECTION", None)

    def _delete_key(self) -> None:
        """Delete the site's key, as an operator may."""
        if "KV_CHORIA_LEADER_ELECTION" in self.source.streams:
            deletion = b"NATS/1.0\r\nKV-Operation: DEL\r\n\r\n"
            self.source.publish(None, f"$KV.CHORIA_LEADER_ELECTION.{election_key(SITE, 'S')}", "", deletion, b"")

    def _member(self, home: Home) -> Settings:
        return self._configured(home, leader_election_name=home.name)

    def _fault(self, host: Host, process: Process, subject: str) -> str | None:
        if subject.startswith(("T.", "FEED.")) and not process.dead:
            (home,) = (each for each in self.homes if process in each.processes)
            overdue = self.world.seconds - home.lease.deadline
            if overdue >= _MARGIN_SECONDS:
                self._note(f"{home.name} publishes {subject} {overdue} s after its lease")
        kind = super()._fault(host, process, subject)
        if kind is None and not process.dead and self._meets(self.suspends, "suspended at a request"):
            self._freeze(next(home for home in self.homes if process in home.processes))
        return kind

    def _reach(self, home: Home, point: Point) -> None:
        super()._reach(home, point)
        if self._meets(self.suspends, f"suspended at {point}"):
            self._freeze(home)
            # It acts until its next wait.
            self.world.sleep(0.0)

    def _note_lease(self, folder: Path) -> None:
        """Note a second member whose lease holds."""
        leaders = [home.name for home in self.homes if home.lease.holds]
        if len(leaders) > 1:
            self._note(f"{leaders} lead when {folder.parent.parent.name} begins or continues its term")

    def _note(self, problem: str) -> None:
        self.outcome.problem = self.outcome.problem or problem

    def _drain(self, site: str) -> None:
        """Let the members work until the leader's run has no failure and no work; its home is the centre's too."""
        if site != SITE:
            super()._drain(site)
            return
        for _ in range(_LAST_ROUNDS):
            self._round()
            self.world.sleep(5.0)
            for home in self.homes:
                home.join()
            leading = [home for home in self.homes if home.reports and home.lease.holds]
            errors = [home.error for home in self.homes if home.error and not isinstance(home.error, StandbyError)]
            failures = [report.failure for home in leading for report in home.reports.values() if report.failure]
            if leading and not errors and not failures and not any(home.is_dead for home in self.homes):
                self.home = leading[0]
                for home in self.homes:
                    home.kill()
                    home.bury()
                return
        raise Difference(
            f"{site}: the last rounds fail: {failures}, {errors}, leading {[home.name for home in leading]}"
        )


def run_history(seed: int, folder: Path, only: Collection[int] | None = None, choice: Choice | None = None) -> Outcome:
    """Run the history of a seed; every twentieth one has members, unless the choice says otherwise."""
    members = choice.members if choice else 0
    elected = members > 1 or (not members and seed % 20 == 19)
    return (ElectedHistory if elected else History)(seed, folder, only, choice).run()


def shrink(outcome: Outcome, folder: Path, choice: Choice | None = None) -> Outcome:
    """Return the failing history of a seed with as few faults as possible."""
    best = outcome
    for number in outcome.effective:
        fewer = [each for each in best.effective if each != number]
        tried = run_history(outcome.seed, folder, fewer, choice)
        if tried.problem is not None:
            best = tried
    return best
