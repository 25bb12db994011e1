"""One history: a plan drawn from a seed, the platform under its faults, and the comparison with independent rules.

A plan is a list of steps and a list of faults. To shrink a failure, leave out faults and steps by their numbers: the rest is
drawn as before.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sr_assets.adapters import crash_points
from sr_assets.adapters.crash_points import Point
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.messages import last_origin
from sr_assets.settings import Settings
from sr_assets_tests.reference import Expected, Rules, Seen, blind_spans, by_field, expect
from sr_assets_tests.sim.network import Host
from sr_assets_tests.sim.platform import IN_PROCESS, SITE, Home, install_hook, simulated
from sr_assets_tests.sim.streams import Stored
from sr_assets_tests.sim.world import SECOND_NS, Process, StuckError

BEGIN_NS: Final = 1_800_000_000 * SECOND_NS
#: How often the platform may try before the end of a history.
_LAST_RUNS: Final = 8
_CENTRE: Final = "CENTRE"
#: The events of advisories by the number that the centre stores.
_EVENTS: Final = ("new", "timeout", "recover", "expire")
_REQUEST_FAULTS: Final = (
    "lost",
    "unanswered",
    "closed",
    "closed after",
    "restarted",
    "tail lost",
    "kill before",
    "kill after",
)


class Difference(AssertionError):  # noqa: N818  a result
    """The platform's results are not those of the rules."""


@dataclass
class Outcome:
    """What a history did: faults and points by name, the steps, and the difference, if any."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)
    steps: list[str] = field(default_factory=list)
    problem: str | None = None
    #: The numbers of the faults that took effect, in the order of the requests and points that they met.
    effective: list[int] = field(default_factory=list)
    messages: int = 0
    transitions: int = 0
    #: A checksum of all requests with their times: equal for equal histories.
    digest: int = 0


@dataclass(frozen=True)
class Choice:
    """What histories are drawn from: how many members (0: any), and the kinds of faults (none: all)."""

    members: int = 0
    kinds: frozenset[str] = frozenset()


class _Defects(logging.Handler):
    """Collects tracebacks that the platform logs: errors that none of its rules knows."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            formatted = logging.Formatter().formatException(record.exc_info)
            self.texts.append(f"{record.getMessage()}\n{formatted}")


class History:
    """A history of one seed; `only` are the numbers of the faults that may take effect, None for all."""

    most_steps = 30_000

    def __init__(
        self, seed: int, folder: Path, only: Collection[int] | None = None, choice: Choice | None = None
    ) -> None:
        self.choice = choice or Choice()
        self.seed, self.folder, self.only = seed, folder / f"history-{seed}", only
        #: Draws the plan; the world draws what happens meanwhile.
        self.plan = random.Random(f"plan {seed}")
        self.luck = random.Random(f"faults {seed}")
        self.outcome = Outcome(seed)
        self.defects = _Defects()
        self.seen: list[Stored] = []
        self._met = 0
        self.disordered = False
        self.backup = folder / f"backup-{seed}"
        #: The sequences that the source lost before they were read.
        self.gone: list[int] = []
        #: When each node last sent a message.
        self.last_ns: dict[int, int] = {}

    def run(self) -> Outcome:
        """Run the history; a difference is in the outcome."""
        shutil.rmtree(self.folder, ignore_errors=True)
        loggers = [logging.getLogger(name) for name in ("sr_assets", "asyncio")]
        propagates = [logger.propagate for logger in loggers]
        for logger in loggers:
            logger.addHandler(self.defects)
            logger.propagate = False
        try:
            with simulated(self.seed, BEGIN_NS, self.most_steps) as (self.world, self.network):
                self.world.run(self._live)
        except (Difference, StuckError) as difference:
            self.outcome.problem = f"{type(difference).__name__}: {difference}"
        finally:
            crash_points.hook = None
            for logger, propagate in zip(loggers, propagates, strict=True):
                logger.removeHandler(self.defects)
                logger.propagate = propagate
            for used in (self.folder, self.backup):
                shutil.rmtree(used, ignore_errors=True)
        if self.defects.texts:
            self.outcome.problem = self.outcome.problem or self.defects.texts[0]
        return self.outcome

    # ------------------------------------------------------------------------------------------------------ the plan

    def _live(self) -> None:
        plan = self.plan
        self._found(["one"])
        self.tracked = plan.random() < 0.8
        self.centre = self.tracked and plan.random() < 0.25
        self.minutes = plan.choice((10, 60, 600))
        window = {"duplicate_window": plan.choice((100_000_000, 120 * SECOND_NS))}
        self.source.create("S", allow_direct=plan.random() < 0.8)
        self.source.create("FEED", **window)
        if plan.random() < 0.7:
            self.target.create("T", allow_direct=plan.random() < 0.8, **window)
        self.senders = plan.choice((1, 3, 20))
        self.incidents = plan.choice(((), ("back up", "put back", "put back"), ("lose unread",)))
        self.home.clock_ns = plan.choice((0, 0, -20, 20)) * 60 * SECOND_NS
        self.source.clock_ns = plan.choice((0, 0, -20, 20)) * 60 * SECOND_NS
        self.rates = (0.0, 0.0)
        for _ in range(plan.randrange(2, 5)):
            self._step(plan.choice(("publish", *["publish and run"] * 4, "run", "wait", "wait", *self.incidents)))
        self._end()

    def _found(self, names: list[str]) -> None:
        """Make the servers and the homes."""
        self.source, self.target = self.network.host("source:4222"), self.network.host("target:4222")
        for host in (self.source, self.target):
            host.fault = self._fault
        self.homes = [Home(self.world, self.folder, name) for name in names]
        self.home = self.homes[0]
        install_hook(self.homes, self._reach)

    def _step(self, kind: str) -> None:
        plan = self.plan
        self.outcome.steps.append(kind)
        if kind in {"back up", "put back", "lose unread"}:
            {"back up": self._back_up, "put back": self._put_back, "lose unread": self._lose_unread}[kind]()
            return
        if kind == "wait":
            self.world.sleep(plan.choice((1.0, 40.0, self.minutes * 31.0, self.minutes * 61.0, self.minutes * 130.0)))
            return
        if kind != "run":
            for _ in range(plan.choice((1, 5, 12, 30))):
                self._publish()
        if kind != "publish":
            self.rates = plan.choice(((0.0, 0.05), (0.01, 0.02), (0.03, 0.0), (0.1, 0.1)))
            settings = self._settings()
            self.home.start(settings)
            for _ in range(plan.choice((0, 0, 12))):
                self.world.sleep(plan.choice((0.003, 0.2)))
                self._publish()
            self.home.join()
            self.home.bury()
            if self.centre:
                self.home.start(settings, _CENTRE)
                self.home.join()
                self.home.bury()
            self.rates = (0.0, 0.0)

    def _back_up(self) -> None:
        # A home without a state is a lost one: only an operator may let it begin again.
        state = self._state()
        if state is not None and state.has_position:
            shutil.rmtree(self.backup, ignore_errors=True)
            shutil.copytree(self.home.folder, self.backup)

    def _put_back(self) -> None:
        """Replace the home by an older one."""
        if self.backup.exists():
            shutil.rmtree(self.home.folder)
            shutil.copytree(self.backup, self.home.folder)

    def _state(self) -> StreamState | None:
        folder = self.home.folder / "sites" / SITE
        if not (folder / "state.duckdb").exists():
            return None
        with SiteState(folder) as state:
            return state.load_stream("S")

    def _lose_unread(self) -> None:
        """Let the source lose messages before they are read."""
        loaded = self._state() if self.tracked else None
        if loaded is None or not loaded.has_position:
            return
        stream = self.source.stream("S")
        unread = [sequence for sequence in stream.order if sequence >= loaded.next_sequence]
        for sequence in self.plan.sample(unread, self.plan.randrange(len(unread) + 1)):
            stream.remove(sequence)
            self.gone.append(sequence)

    def _settings(self) -> Settings:
        return self._configured(self.home)

    def _configured(self, home: Home, **more: Any) -> Settings:
        entry: dict[str, Any] = {
            "stream": "S",
            "target_stream": "T",
            "target_subject_prefix": "T",
            "source_url": "nats://source:4222",
            "target_url": "nats://target:4222",
            "batch_messages": self.plan.choice((4, 10, 1000, 1000)),
        }
        if self.tracked:
            entry |= {"inspect_field": "sender", "inspect_duration": f"{self.minutes}m", "size_trigger": 3}
            entry |= {"advisory": {"subject": "FEED.%s.%v", "reliable": True}}
        feeds = (
            [{"name": _CENTRE, "stream": "FEED", "url": "nats://source:4222", "batch_messages": 7}]
            if self.centre
            else []
        )
        return home.configure({"name": SITE, "spark": IN_PROCESS, "streams": [entry], "feeds": feeds, **more})

    def _publish(self) -> None:
        node = self.plan.randrange(self.senders)
        if self.plan.random() < 0.2 and node in self.last_ns:
            # A silence of exactly the warning or the interval, or just longer.
            silence_ns = self.minutes * self.plan.choice((30, 60)) * SECOND_NS + self.plan.randrange(2)
            self.world.sleep_until(self.last_ns[node] + silence_ns)
        body = {"sender": f"n{node}", "n": len(self.seen), "pad": "x" * self.plan.randrange(5)}
        payload = json.dumps(body).encode() if self.plan.random() < 0.95 else b"no sender"
        self.last_ns[node] = self.world.now_ns
        self.source.publish(None, f"S.{self.plan.randrange(3)}", "", b"", payload)
        stream = self.source.stream("S")
        self.seen.append(stream.messages[stream.last])
        self.world.sleep(self.plan.choice((0.0, 0.001, 2.0, self.minutes * 7.0)))

    # ---------------------------------------------------------------------------------------------------- the faults

    def _meets(self, rate: float, kind: str) -> bool:
        """Decide whether the next request or point meets a fault of a kind that may take effect; count it."""
        if not rate or self.luck.random() >= rate or (self.choice.kinds and kind not in self.choice.kinds):
            return False
        self._met += 1
        if self.only is not None and self._met not in self.only:
            return False
        self.outcome.effective.append(self._met)
        self.outcome.faults[kind] += 1
        return True

    def _fault(self, host: Host, process: Process, subject: str) -> str | None:
        request = f"{self.world.now_ns} {host.address} {subject}"
        self.outcome.digest = zlib.crc32(request.encode(), self.outcome.digest)
        kind = self.luck.choice(_REQUEST_FAULTS)
        if not self._meets(self.rates[0], kind):
            return None
        # A leader that changes within a window loses some messages and stores later ones.
        self.disordered |= kind == "lost" and subject.startswith("T.")
        if kind == "tail lost":
            # What the source loses is another history.
            if host is self.target:
                self.world.call_at(self.world.now_ns, lambda: self.target.restart(lost=self.luck.randrange(1, 6)))
            return "closed"
        home = next(each for each in self.homes if process in {each.process, each.service})
        if kind == "kill before":
            home.kill()
            return "closed"
        if kind == "kill after":
            self.world.call_at(self.world.now_ns, home.kill)
            return None
        return kind

    def _reach(self, home: Home, point: Point) -> None:
        self.outcome.points[point] += 1
        if self._meets(self.rates[1], f"kill at {point}"):
            home.kill()

    # ------------------------------------------------------------------------------------------------ the comparison

    def _end(self) -> None:
        """Let the platform recover, and compare."""
        for site in (SITE, *([_CENTRE] if self.centre else ())):
            self._drain(site)
        with SiteState(self.home.folder / "sites" / SITE) as state:
            loaded = state.load_stream("S")
            queued = state.copy_queue("S").size()
            waiting = state.count_unpublished("S")
            copying = state.load_copying("S")
        assert loaded is not None
        if queued or waiting:
            raise Difference(f"{queued} copies and {waiting} advisories still wait")
        seen = loaded.seen_messages if self.tracked else copying.copied_messages
        accounted = (seen, loaded.gap_messages)
        if accounted != (len(self.seen) - len(self.gone), len(self.gone)):
            raise Difference(f"seen, lost {accounted} of {len(self.seen)} messages, of which {len(self.gone)} are lost")
        if self.tracked and loaded.seen_messages - loaded.skipped_messages != copying.copied_messages:
            raise Difference(
                f"{loaded.seen_messages} seen, {loaded.skipped_messages} skipped, {copying.copied_messages} copied"
            )
        self._compare(self._expected(loaded.watermark_ns or 0))

    def _view(self) -> dict[str, tuple[int, str]]:
        """Return the number and the kind of each node's last transition at the centre."""
        with SiteState(self.home.folder / "sites" / _CENTRE) as state:
            rows = state.connection.execute("SELECT node, transition, event_code FROM global_nodes").fetchall()
        return {node: (transition, _EVENTS[code]) for node, transition, code in rows}

    def _drain(self, site: str) -> None:
        """Run a site until a run has no failure."""
        for _ in range(_LAST_RUNS):
            self.world.sleep(3.0)
            self.home.start(self._settings(), site)
            self.home.join()
            if self.home.error is not None:
                raise Difference(f"{site} does not open: {self.home.error!r}")
            failures = [report.failure for report in self.home.reports.values() if report.failure]
            if not failures:
                return
        raise Difference(f"the last runs fail: {failures}")

    def _expected(self, watermark_ns: int) -> Expected:
        minute = 60 * SECOND_NS
        interval_ns = self.minutes * minute
        sender: Callable[[Seen], str | None] = by_field if self.tracked else lambda _: None
        rules = Rules(SITE, SITE, "S", interval_ns, interval_ns // 2, "sender", sender, trigger_bytes=3)
        history = [
            Seen(each.sequence, each.at_ns, each.subject, each.headers, each.payload)
            for each in self.seen
            if each.sequence not in self.gone
        ]
        spans = blind_spans(history, self.gone, watermark_ns)
        if history and any(sequence < history[0].sequence for sequence in self.gone):
            # The first message that the source held when the batch was planned is the last one before that hole.
            first_ns = history[0].stored_ns
            spans.append(
                (first_ns, next((each.stored_ns for each in history if each.stored_ns > first_ns), watermark_ns))
            )
        return expect(rules, history, watermark_ns, spans)

    def _compare(self, expected: Expected) -> None:
        copied = [sequence for _, sequence in expected.copied]
        held = self.target.streams["T"].messages.values() if "T" in self.target.streams else ()
        copies = [origin.sequence if (origin := last_origin(each.headers)) else None for each in held]
        self.outcome.messages = len(self.seen)
        if self.disordered:
            copies = sorted(copies, key=lambda sequence: sequence or 0)
        if copies != copied:
            raise Difference(f"copies {copies}, expected {copied}")
        bodies = [json.loads(each.payload) for each in self.source.streams["FEED"].messages.values()]
        told: dict[str, list[tuple[int, str, str]]] = {}
        for body in bodies:
            told.setdefault(body["value"], []).append((body["transition"], body["event"], body["event_time"]))
        due: dict[str, list[tuple[int, str, str]]] = {}
        for body in expected.advisories:
            due.setdefault(body["value"], []).append((body["transition"], body["event"], body["event_time"]))
        self.outcome.transitions = len(expected.advisories)
        if self.centre:
            last = {node: (events[-1][0], events[-1][1]) for node, events in due.items()}
            if (view := self._view()) != last:
                raise Difference(f"the centre has {view}, expected {last}")
        if told != due:
            node = next(each for each in {**told, **due} if told.get(each) != due.get(each))
            raise Difference(f"advisories of {node}: {told.get(node)}, expected {due.get(node)}")
