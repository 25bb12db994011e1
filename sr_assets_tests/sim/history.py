"""One history: a plan drawn from a seed, the platform under its faults, and the comparison with independent rules.

A plan is a list of steps and a list of faults. To shrink a failure, leave out faults and steps by their numbers: the rest is
drawn as before.
"""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import duckdb

from sr_assets.adapters import crash_points
from sr_assets.adapters.crash_points import Point
from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.adapters.state.operator_requests import Action, Request, leave_request
from sr_assets.adapters.state.records import CopyState, StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.messages import Message, last_origin
from sr_assets.domain.positions import parse_rfc3339_ns
from sr_assets.domain.received import LIFE_CYCLE, STATUS
from sr_assets.settings import Settings
from sr_assets_bench.comparison import tables as comparison
from sr_assets_bench.comparison.feeds import compare_feed
from sr_assets_bench.comparison.source_rollback import Past
from sr_assets_bench.comparison.streams import compare, held_now
from sr_assets_bench.comparison.tables import Kind
from sr_assets_tests.reference import Act, Rules, Seen, blind_spans, by_field
from sr_assets_tests.sim.network import Host
from sr_assets_tests.sim.platform import IN_PROCESS, SITE, Home, install_hook, simulated
from sr_assets_tests.sim.streams import Stream
from sr_assets_tests.sim.world import SECOND_NS, Process, StuckError

BEGIN_NS: Final = 1_800_000_000 * SECOND_NS
_MINUTE_NS: Final = 60 * SECOND_NS
#: The longest disturbance.
_LONGEST_SECONDS: Final = 40
#: How long a copy log keeps copies, less what a run takes.
_LOGGED_SECONDS: Final = 3500
#: How often the platform may try before the end of a history.
_LAST_RUNS: Final = 8
_CENTRE: Final = "CENTRE"
_EVENTS: Final = [event.value for event in LIFE_CYCLE]
#: The refusals of `recover` for a home that has nothing to recover, or that an interrupted recovery completed.
_NOTHING_LOST: Final = re.compile("already has a readable state|nothing to recover from")
#: Headers of messages, where # is unique: of a node, of a hop before, and one that a copy must not have.
_HEADERS: Final = (
    b"NATS/1.0\r\nKind: a\r\nkind: b\r\n\r\n",
    b"NATS/1.0\r\nChoria-SR-Source: EDGE # SITE SITE 1799990000000\r\nNats-Msg-Id: SITE/SITE/EDGE/1/#\r\n\r\n",
    b"NATS/1.0\r\nNats-Msg-Id: #\r\nKind: a\r\nNats-Trace-Dest: traces\r\n\r\n",
)
_REQUEST_FAULTS: Final = (
    "lost",
    "unanswered",
    "closed",
    "closed after",
    "restarted",
    "tail lost",
    "late",
    "answered late",
    "kill before",
    "kill after",
)


def _entry(rules: Rules, target: str) -> dict[str, Any]:
    """Return the entry of a stream with these rules and a target, but for a field that demands copies."""
    entry: dict[str, Any] = {
        "stream": rules.stream,
        "target_stream": target,
        "target_subject_prefix": target,
        "source_url": "nats://source:4222",
        "target_url": "nats://target:4222",
    }
    if rules.inspect_field:
        duration = f"{rules.interval_ns // _MINUTE_NS}m"
        entry |= {"inspect_field": "sender", "inspect_duration": duration, "size_trigger": rules.trigger_bytes}
        entry |= {"advisory": {"subject": "FEED.%s.%v", "reliable": True}}
    return entry


def _is_forced(message: Seen) -> bool:
    """Return whether a message demands its copy."""
    return b'"force": true' in message.payload


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


class _Log(logging.Handler):
    """Collects the platform's warnings, and tracebacks: errors that none of its rules knows."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.defects: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if record.exc_info and record.exc_info[1] is not None:
            formatted = logging.Formatter().formatException(record.exc_info)
            self.defects.append(f"{record.getMessage()}\n{formatted}")


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
        self.log = _Log()
        self._met = self.published = 0
        #: The highest committed watermark of each stream.
        self.watermarks = Counter[str]()
        #: What each process has committed last of each stream: restart and position, and the watermark.
        self.committed: dict[tuple[Process, str], tuple[tuple[int, int], int]] = {}
        #: Whether copies may have another order than their originals, `recover` has rebuilt the state, and the source's
        #: messages may be replaced by others, or its target.
        self.disordered = self.recovered = self.resets = self.target_resets = False
        #: Whether a state is rebuilt from the target's copies.
        self.rebuilds = False
        #: What the source held before each rollback.
        self.held: list[list[Seen]] = []
        self.created: list[int] = []
        self.backup = folder / f"backup-{seed}"
        #: The sequences that the source lost before they were read.
        self.gone: list[int] = []
        self.replicas = 1
        #: What the source held when it lost messages before a recovery.
        self.expired: list[Seen] = []
        #: The rules of later configurations, see `reference.Rules`.
        self.later: list[tuple[int, int, Rules]] = []
        self.trigger, self.forces, self.targets, self.target_reset = 3, False, ["T"], "recopy"
        #: The stream that a centre follows, and the advisories of the site that a relay has stored there.
        self.followed, self.relayed = "FEED", set[int]()
        #: What operators did to nodes.
        self.acts: list[Act] = []
        #: The rules of a second stream of the site, with the same target and feed.
        self.second: Rules | None = None
        #: The time of the newest message that the target held before it lost any.
        self.newest_ns = 0
        #: When each node last sent a message to the first stream.
        self.last_ns: dict[int, int] = {}

    def run(self) -> Outcome:
        """Run the history; a difference is in the outcome."""
        shutil.rmtree(self.folder, ignore_errors=True)
        loggers = [logging.getLogger(name) for name in ("sr_assets", "asyncio")]
        propagates = [logger.propagate for logger in loggers]
        for logger in loggers:
            logger.addHandler(self.log)
            logger.propagate = False
        try:
            world = simulated(
                self.seed,
                BEGIN_NS,
                self.most_steps,
                publishes=lambda: self.publishes,
                commits=self._note_commit,
                leads=self._note_lease,
                acts=self._note_act,
            )
            with world as (self.world, self.network):
                self.world.run(self._live)
        except (Difference, StuckError) as difference:
            self.outcome.problem = f"{type(difference).__name__}: {difference}"
        except Exception:  # noqa: BLE001  results that the comparison does not understand; the next history runs
            self.outcome.problem = traceback.format_exc()
        finally:
            crash_points.hook = None
            for logger, propagate in zip(loggers, propagates, strict=True):
                logger.removeHandler(self.log)
                logger.propagate = propagate
            for used in (self.folder, self.backup):
                shutil.rmtree(used, ignore_errors=True)
        for defect in (*self.log.defects, *self.world.defects):
            self.outcome.problem = self.outcome.problem or defect
        return self.outcome

    # ------------------------------------------------------------------------------------------------------ the plan

    def _live(self) -> None:
        plan = self.plan
        self._found(["one"])
        self.tracked = plan.random() < 0.8
        self._draw_centre(0.25 if self.tracked else 0.0)
        self.minutes = plan.choice((10, 60, 600))
        self.first_rules = self._rules()
        self.home.clock_ns = plan.choice((0, 0, -20, 20)) * _MINUTE_NS
        #: The most that the source's clock was ahead.
        self.ahead_ns = self.source.clock_ns = plan.choice((0, 0, -20, 20)) * _MINUTE_NS
        self.short_window = plan.random() < 0.5
        window = {"duplicate_window": 100_000_000 if self.short_window else 120 * SECOND_NS}
        #: Of all streams. A leader of one replica is never deposed, and three of them lose nothing.
        window["num_replicas"] = self.replicas = plan.choice((1, 1, 3))
        self.source.create("S", allow_direct=plan.random() < 0.8, num_replicas=self.replicas)
        self.source.create("FEED", **window)
        others = plan.choice((["T.>"], ["T.>"], ["T.>", "other.>"]))
        self.target_keys = {"allow_direct": plan.random() < 0.8, "subjects": others, **window}
        if plan.random() < 0.7:
            self.target.create("T", **self.target_keys)
        self.senders = plan.choice((1, 3, 20))
        self.publishes = plan.random() < 0.25
        incidents = {"back up": self._back_up, "put back": self._put_back, "lose unread": self._lose_unread}
        incidents |= {"roll back": self._roll_back, "recreate": self._recreate, "lose the home": self._lose_home}
        incidents |= {"delete the target": self._delete_target, "lose the target's end": self._lose_end}
        incidents |= {"reconfigure": self._reconfigure, "retire": self._retire}
        # Each of them leaves what another one would not expect.
        both = [(first, "lose the home") for first in ("roll back", "recreate")]
        kinds = plan.choice(((), ("back up", "put back"), *((kind,) for kind in [*incidents][2:]), *both))
        self.resets = not {"roll back", "recreate"}.isdisjoint(kinds)
        self.target_resets, self.rebuilds = "delete the target" in kinds, "lose the home" in kinds
        if not self.rebuilds and plan.random() < 0.25:
            self.second = self._second_rules()
            self.source.create("Q", allow_direct=plan.random() < 0.8, num_replicas=self.replicas)
            # The platform would create it for the subjects of one of them.
            self.target.streams.pop("T", None)
            self.target.create("T", **self.target_keys)
        work = ("publish", *["publish and run"] * 4, "run", "wait", "wait")
        steps = [plan.choice(work) for _ in range(plan.randrange(3))]
        for kind in kinds:
            steps += ["publish and run", kind]
        for kind in (*steps, *(plan.choice((*work, *kinds)) for _ in range(plan.randrange(1, 4)))):
            self.outcome.steps.append(kind)
            if kind in incidents:
                incidents[kind]()
            elif kind == "wait":
                minute = self.minutes
                self.world.sleep(plan.choice((1.0, 40.0, minute * 31.0, minute * 61.0, minute * 130.0)))
            else:
                self._work(kind)
        self._end()

    def _draw_centre(self, share: float) -> None:
        """Decide whether a share of histories has a centre, and whether it follows the advisories or a relay of them."""
        self.centre = self.plan.random() < share
        if self.centre and self.plan.random() < 0.5:
            self.followed = "RELAY"
            self.source.create("RELAY")

    def _relay(self, *, whole: bool = False) -> None:
        """Store advisories where the centre reads them: in another order, some again, and unless `whole`, some only later.

        So does a way over other clusters, whose copiers repeat what was not acknowledged.
        """
        if self.followed == "FEED":
            return
        told, stream = self.source.streams["FEED"].messages, self.source.streams[self.followed]
        fresh = [each for each in told if each not in self.relayed and (whole or self.plan.random() < 0.6)]
        again = self.plan.sample(sorted(self.relayed), len(self.relayed) // 4)
        for sequence in self.plan.sample([*fresh, *again], len(fresh) + len(again)):
            before = stream.last
            self.source.publish(None, f"{self.followed}.m", "", b"", told[sequence].payload)
            if stream.last > before:
                self.relayed.add(sequence)

    def _found(self, names: list[str]) -> None:
        """Make the servers and the homes."""
        self.source, self.target = self.network.host("source:4222"), self.network.host("target:4222")
        for host in (self.source, self.target):
            host.fault = self._fault
        self.homes = [Home(self.world, self.folder, name) for name in names]
        self.home = self.homes[0]
        self.rates = (0.0, 0.0)
        install_hook(self.homes, self._reach)

    def _work(self, kind: str) -> None:
        """Publish messages, run the platform, or both, with faults."""
        plan = self.plan
        if kind != "run":
            for _ in range(plan.choice((1, 5, 12, 30))):
                self._publish()
        if kind != "publish":
            self.rates = plan.choice(((0.0, 0.05), (0.01, 0.02), (0.03, 0.0), (0.1, 0.1)))
            settings = self._configured(self.home, paused=plan.random() < 0.1)
            self.home.start(settings)
            if plan.random() < 0.1:
                self.world.sleep(plan.choice((0.0, 0.01, 0.1)))
                if not self.home.is_dead:
                    self.home.start_rival(settings)
            self._disturb(self.home)
            for _ in range(plan.choice((0, 0, 12))):
                self.world.sleep(plan.choice((0.003, 0.2)))
                self._publish()
            self._finish()
            if self.centre:
                self._relay()
                self.home.start(settings, _CENTRE)
                self._finish()
            self.rates = (0.0, 0.0)

    def _finish(self) -> None:
        """Wait for the end of the home's process, and check what it has committed."""
        self.home.join()
        self.home.bury()
        if self.recovered or not self._has_state:
            return
        with SiteState(self._site_folder) as store:
            for stream, tracked in (("S", self.tracked), ("Q", bool(self.second and self.second.inspect_field))):
                state = store.load_stream(stream)
                if state is not None and tracked:
                    self._check(state, store.load_copying(stream), store.copy_queue(stream).size())

    def _check(self, state: StreamState, copying: CopyState, queued: int) -> None:
        """Check the counters of a stream, and its watermark."""
        parts = (
            copying.copied_messages,
            state.skipped_messages,
            queued,
            copying.parked_messages,
            copying.lost_messages,
        )
        if state.seen_messages != sum(parts) and not self.resets:
            raise Difference(f"{state.seen_messages} seen, of them (copied, skipped, queued, parked, lost) {parts}")
        if (state.watermark_ns or 0) < self.watermarks[state.stream]:
            raise Difference(f"the watermark falls from {self.watermarks[state.stream]} to {state.watermark_ns}")
        self.watermarks[state.stream] = state.watermark_ns or 0

    def _note_commit(self, state: StreamState) -> None:
        """Refuse a fallen watermark, or a fallen position unless the source restarted, in what a process commits."""
        key, now = (self.world.process, state.stream), ((state.starts, state.next_sequence), state.watermark_ns or 0)
        before = self.committed.setdefault(key, now)
        if now[0] < before[0] or now[1] < before[1]:
            self.outcome.problem = f"{state.stream}: (restart, position) and watermark fall from {before} to {now}"
        self.committed[key] = now

    def _note_lease(self, folder: Path) -> None:
        """Check a lease that a process has written and that holds: without an election, runs of this home hold locks."""

    def _note_act(self, state: StreamState, request: Request) -> None:
        """Remember what a process has committed at the request of an operator."""
        act = Act(state.next_sequence, state.watermark_ns or 0, request.node, request.action == "retire")
        self.acts.append(act)

    def _retire(self) -> None:
        """Let an operator retire or restore nodes; the next run takes the request, if it is not too old by then."""
        for _ in range(self.plan.randrange(1, 4) if self.last_ns else 0):
            action: Action = self.plan.choice(("retire", "retire", "unretire"))
            leave_request(self._site_folder, action, "S", f"n{self.plan.choice(sorted(self.last_ns))}")

    def _back_up(self) -> None:
        # A home without a state is a lost one, also one that has made no copy: only an operator may let it begin again.
        if not self._has_state:
            return
        with SiteState(self._site_folder) as store:
            made = [
                (state := store.load_stream(stream)) and state.has_position and store.load_copying(stream).target_stream
                for stream in self._streams
            ]
        if all(made):
            shutil.rmtree(self.backup, ignore_errors=True)
            shutil.copytree(self.home.folder, self.backup)

    def _put_back(self) -> None:
        """Replace the home by an older one, or only its state: the history of snapshots has a folder of its own."""
        if self.backup.exists():
            part = self.plan.choice((".", "sites"))
            shutil.rmtree(self.home.folder / part)
            shutil.copytree(self.backup / part, self.home.folder / part)
            self.watermarks.clear()

    @property
    def _streams(self) -> list[str]:
        return ["S", "Q"] if self.second else ["S"]

    @property
    def _site_folder(self) -> Path:
        return self.home.folder / "sites" / SITE

    @property
    def _has_state(self) -> bool:
        return (self._site_folder / "state.duckdb").exists()

    def _state(self) -> StreamState | None:
        if not self._has_state:
            return None
        with SiteState(self._site_folder) as state:
            return state.load_stream("S")

    def _lose_unread(self) -> None:
        """Let the source lose messages before they are read."""
        loaded = self._state() if self.tracked else None
        if loaded is None or not loaded.has_read:
            return
        with SiteState(self._site_folder) as store:
            changed = max(store.nodes("S").table()["status_since_ns"].to_pylist(), default=0)
        if changed > (loaded.last_stored_ns or 0):
            # Silence until the watermark has been announced; the rules, which know messages alone, would postpone it.
            return
        stream = self.source.stream("S")
        unread = [sequence for sequence in stream.order if sequence >= loaded.next_sequence]
        for sequence in self.plan.sample(unread, self.plan.randrange(len(unread) + 1)):
            stream.remove(sequence)
            self.gone.append(sequence)
        # The rules know when a loss ends from the next message alone, and a run from the time at which it finds the end.
        self._publish()

    def _roll_back(self) -> None:
        """Let the source lose its last messages, which may have been read."""
        stream = self.source.stream("S")
        if stream.last:
            self._hold()
            stream.roll_back(self.luck.randrange(stream.last))

    def _recreate(self) -> None:
        """Delete the source's stream, and create it again."""
        self._hold()
        config = self.source.streams.pop("S").config
        self.source.create("S", **{key: config[key] for key in ("allow_direct", "num_replicas")})

    def _delete_target(self) -> None:
        """Delete the target's stream, and perhaps create it again; otherwise the platform does, unless streams share it."""
        self.target.streams.pop("T", None)
        if self.second or self.luck.random() < 0.5:
            self.target.create("T", **self.target_keys)

    def _delete_used_target(self) -> None:
        """Delete the target's stream during a batch, whose copies the next stream may hold before those of earlier messages."""
        self.disordered = True
        self._delete_target()

    def _lose_end(self) -> None:
        """Let the target lose its last messages, whose places others may take."""
        if self.replicas == 1:
            self._restart_target(self.plan.randrange(1, 6))
            for _ in range(self.plan.randrange(7)):
                self.target.publish(None, "other.m", "", b"", b"")

    def _restart_target(self, lost: int) -> None:
        """Restart the target without some of its last messages, none older than the hour that a copy log holds."""
        target = self.target.streams.get(self.targets[-1])
        stored = [each.at_ns for each in target.messages.values()] if target else []
        self.newest_ns = max([self.newest_ns, *stored])
        recent = sum(at_ns > self.newest_ns - _LOGGED_SECONDS * SECOND_NS for at_ns in stored)
        self.target.restart(lost=min(lost, recent))

    def _lose_home(self) -> None:
        """Lose the home when all work is done, and recover it; or rebuild the state of one that may have work left."""
        # Without copies, the next message of each node is copied. A state that had to be recovered without some messages
        # counts other transitions than the announced ones, so that nothing tells which of them are later.
        forced = self._has_state and not (self.held or self.expired) and self.plan.random() < 0.4
        forced = forced and bool(_Results(self.source, self.target).copies("T"))
        if not forced:
            # Nodes may fall silent, and an advisory waits as long as its stream is full.
            self.world.sleep(_LONGEST_SECONDS + self.minutes * self.plan.choice((0.0, 31.0, 61.0)))
            self._drain(SITE)
            # The history has a folder of its own.
            lost = self.home.folder / self.plan.choice((".", "sites"))
            shutil.rmtree(lost, ignore_errors=True)
            lost.mkdir(exist_ok=True)
        self.recovered = True
        if not forced:
            self._lose_known()
        self.rates = self.plan.choice(((0.0, 0.0), (0.03, 0.1)))
        for _ in range(_LAST_RUNS):
            self.home.recover(self._settings(), force=forced)
            self._finish()
            if self.home.completed or _NOTHING_LOST.search(str(self.home.error)):
                break
            forced |= "--force" in str(self.home.error)
            self.rates = (0.0, 0.0)
        else:
            raise Difference(f"the home cannot be recovered: {self.home.error!r}")
        self.rates = (0.0, 0.0)
        if self.resets:
            # The next run reads again what is announced after the position, unless the source loses it before.
            self._drain(SITE)

    def _lose_known(self) -> None:
        """Let the source lose messages that were read, or create it again."""
        stream, way = self.source.stream("S"), self.plan.choice(("none", "none", "oldest", "any", "all"))
        if way == "none":
            return
        self.expired += held_now(_Results(self.source, self.target), "S")
        if way == "all":
            self._recreate()
            return
        count = self.plan.randrange(len(stream.order) + 1)
        for sequence in stream.order[:count] if way == "oldest" else self.plan.sample(stream.order, count):
            stream.remove(sequence)

    def _reconfigure(self) -> None:
        """Change the rules between runs; the target, and whether nodes are tracked, only when all work is done."""
        if drained := self.plan.random() < 0.5:
            self.world.sleep(_LONGEST_SECONDS)
            self._drain(SITE)
        state = self._state()
        if state is None or not state.has_position:
            return
        self.minutes, self.trigger = self.plan.choice((10, 60, 600)), self.plan.choice((1, 3, 50))
        self.forces = self.plan.random() < 0.5
        if drained:
            self.targets.append(self.plan.choice(("T", "T2")))
            self.target_reset = "continue"
            self.tracked ^= self.plan.random() < 0.5
        with SiteState(self._site_folder) as store:
            due_ns = store.nodes("S").first_deadline()
        # A run that was killed before it swept the nodes leaves their silence to the new rules.
        decided_ns = min(ns for ns in (state.watermark_ns or 0, due_ns) if ns is not None)
        change = state.next_sequence, decided_ns, self._rules()
        if self.later and self.later[-1][:2] == change[:2]:
            # Nothing was read in between.
            self.later.pop()
        self.later.append(change)

    def _hold(self) -> None:
        """Remember what the source holds before it changes."""
        self.held.append(held_now(_Results(self.source, self.target), "S"))
        self.created.append(self.source.streams["S"].created_ns)

    def _settings(self) -> Settings:
        return self._configured(self.home)

    def _configured(self, home: Home, *, paused: bool = False, **more: Any) -> Settings:
        keys = {"paused": paused, "batch_messages": self.plan.choice((4, 10, 1000, 1000)), "on_source_reset": "recopy"}
        keys |= {"inspect_force_field": "force"} if self.forces and self.tracked else {}
        entries = [_entry(self._rules(), self.targets[-1]) | keys | {"on_target_reset": self.target_reset}]
        if self.second:
            keys = {"batch_messages": self.plan.choice((4, 1000)), "on_target_reset": "recopy"}
            entries.append(_entry(self.second, "T") | keys)
        feeds = (
            [{"name": _CENTRE, "stream": self.followed, "url": "nats://source:4222", "batch_messages": 7}]
            if self.centre
            else []
        )
        return home.configure({"name": SITE, "spark": IN_PROCESS, "streams": entries, "feeds": feeds, **more})

    def _second_rules(self) -> Rules:
        """Draw the rules of the second stream."""
        if self.plan.random() < 0.5:
            return Rules(SITE, SITE, "Q", 0, 0, "", lambda _: None)
        interval_ns = self.plan.choice((10, 60)) * _MINUTE_NS
        return Rules(SITE, SITE, "Q", interval_ns, interval_ns // 2, "sender", by_field)

    def _rules(self) -> Rules:
        """Return the rules of the first stream's configuration."""
        if not self.tracked:
            return Rules(SITE, SITE, "S", 0, 0, "", lambda _: None)
        forced = _is_forced if self.forces else lambda _: False
        interval_ns = self.minutes * _MINUTE_NS
        return Rules(SITE, SITE, "S", interval_ns, interval_ns // 2, "sender", by_field, forced, self.trigger)

    def _publish(self) -> None:
        """Publish a message of a node, some after exactly a silence that the rules name, perhaps after another node's."""
        node = self.plan.randrange(self.senders)
        if self.plan.random() < 0.2 and node in self.last_ns:
            # A silence of exactly the warning or the interval, or just longer.
            silence_ns = self.minutes * self.plan.choice((30, 60)) * SECOND_NS + self.plan.randrange(2)
            self.world.sleep_until(self.last_ns[node] + silence_ns)
            if self.plan.random() < 0.3:
                self._send(self.plan.randrange(self.senders))
        self._send(node)
        if self.plan.random() < 0.3:
            # Unless the target takes it, nothing happens.
            self.target.publish(None, "other.m", "", b"", b"")
        self.world.sleep(self.plan.choice((0.0, 0.001, 2.0, self.minutes * 7.0)))

    def _send(self, node: int) -> None:
        self.published += 1
        body = {"sender": f"n{node}", "n": self.published, "pad": "x" * self.plan.randrange(5)}
        body |= {"force": True} if self.plan.random() < 0.1 else {}
        payload = json.dumps(body).encode() if self.plan.random() < 0.95 else b"no sender"
        stream = "Q" if self.second and self.plan.random() < 0.3 else "S"
        if stream == "S":
            self.last_ns[node] = self.world.now_ns
        headers = self.plan.choice((b"", b"", b"", *_HEADERS)).replace(b"#", str(self.published).encode())
        self.source.publish(None, f"{stream}.{self.plan.randrange(3)}", "", headers, payload)

    # ---------------------------------------------------------------------------------------------------- the faults

    def _disturb(self, home: Home) -> None:
        """Let something happen while a run works."""
        events = self._events(home)
        kind, delay_seconds = self.luck.choice([*events]), self.luck.choice((0.0, 0.01, 0.05, 0.3))
        if self._meets(0.4, kind):
            self.world.call_at(self.world.now_ns + int(delay_seconds * SECOND_NS), events[kind])

    def _events(self, home: Home) -> dict[str, Callable[[], None]]:
        """Return what may happen to a home or the servers at any time."""
        events = {
            "clock jumps": lambda: self._jump(home),
            "no leader": self._take_leader,
            "stream full": self._fill,
            "account full": self._fill_account,
            "network cut": lambda: self._cut(home),
        }
        if self.resets:
            events |= {"rolled back": self._roll_back, "recreated": self._recreate}
        elif self.replicas > 1:
            events["leader deposed"] = self._depose_leader
        return events | ({"target deleted": self._delete_used_target} if self.target_resets else {})

    def _jump(self, home: Home) -> None:
        """Move the clock of a home's machine, or the source's: forwards, or back by less than a watermark's margin.

        The keys of an election expire by the source's clock.
        """
        if len(self.homes) > 1 or self.luck.random() < 0.5:
            home.jump(self.luck.choice((-20, -1, 0, 1, 20)) * _MINUTE_NS)
        else:
            self.ahead_ns = min(20 * _MINUTE_NS, self.ahead_ns + self.luck.choice((0, 1, 300)) * SECOND_NS)
            self.source.clock_ns = self.ahead_ns - self.luck.choice((0, SECOND_NS - 1))

    def _take_leader(self) -> None:
        """Leave a stream without a leader for some time: requests about it are lost."""
        host, stream = self.luck.choice(((self.source, "S"), (self.source, "FEED"), (self.target, self.targets[-1])))
        host.leaderless[stream] = self._later_ns()
        # A window that is sent when the leader returns may lose its first messages.
        self.disordered |= host is self.target

    def _depose_leader(self) -> None:
        """Let a leader without its replicas answer for up to 20 s, while another one stores messages."""
        host, name = self.luck.choice(((self.source, "S"), (self.source, "FEED"), (self.target, self.targets[-1])))
        if name in host.streams:
            host.depose(name, self.world.now_ns + self.luck.choice((5, 9, 20)) * SECOND_NS)
            self.disordered |= host is self.target

    def _fill(self) -> None:
        """Let a stream refuse messages for some time."""
        host, name = self.luck.choice(((self.source, "FEED"), (self.target, self.targets[-1])))
        stream = host.streams.get(name)
        if stream is not None and stream.config["discard"] == "old":
            before = {key: stream.config[key] for key in ("max_msgs", "discard")}
            stream.config |= {"max_msgs": max(1, len(stream.order)), "discard": "new"}
            self.world.call_at(self._later_ns(), lambda: stream.config.update(before))

    def _fill_account(self) -> None:
        """Let the streams of a server refuse messages for some time."""
        streams = self.luck.choice((self.source, self.target)).streams.values()
        ours = [stream for stream in streams if stream.name not in {"S", "Q"}]

        def make_room() -> None:
            for stream in ours:
                stream.account_full = False

        for stream in ours:
            stream.account_full = True
        self.world.call_at(self._later_ns(), make_room)

    def _cut(self, home: Home) -> None:
        """Let the network carry nothing between a home and one or both servers for some time."""
        for host in self.luck.choice(((self.source,), (self.target,), (self.source, self.target))):
            self.world.cuts[home.name, host.address] = self._later_ns()

    def _later_ns(self) -> int:
        return self.world.now_ns + self.luck.choice((1, 4, 9, 15, _LONGEST_SECONDS)) * SECOND_NS

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
        # What a killed process has sent still arrives.
        if process.dead or not self._meets(self.rates[0], kind):
            return None
        # A leader that changes within a window loses some messages and stores later ones.
        self.disordered |= kind in {"lost", "late"} and subject.startswith(f"{self.targets[-1]}.")
        if kind == "late" and self.short_window:
            # Documented: what a server stores after its duplicate window is stored twice.
            return None
        if kind == "tail lost":
            # What the source loses is another history, no run reads an earlier target, and `recover` believes the target. After
            # a restart of the source, a run does not look for the copies before it.
            kept = self.rebuilds or self.resets or len({*self.targets}) > 1
            if host is self.target and self.replicas == 1 and not kept:
                self.world.call_at(self.world.now_ns, lambda: self._restart_target(self.luck.randrange(1, 6)))
            return "closed"
        home = next(each for each in self.homes if process in each.processes)
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
        self.publishes = True
        # The last disturbance is over.
        self.world.sleep(_LONGEST_SECONDS)
        self._drain(SITE)
        if self.centre:
            self._relay(whole=True)
            self._drain(_CENTRE)
        known_alone = self.recovered and (self.held or self.expired)
        differences = [*self._compare_known()] if known_alone else self._compare()
        if self.recovered:
            # It rebuilds no counters, and no transitions before it.
            unknown = {Kind.ROW_WRONG, Kind.GAP_WRONG}
            differences = [
                each
                for each in differences
                if each.kind not in unknown and not each.text.startswith("node_advisories ")
            ]
        if self.target_resets:
            # No history has the messages without a sender, so they are not copied again.
            differences = [each for each in differences if not (each.kind is Kind.LOST and self._lacks_sender(each))]
        if self.disordered:
            differences = [each for each in differences if each.kind is not Kind.DISORDERED]
        if differences:
            raise Difference("; ".join(f"{each.kind}: {each.text}" for each in differences[:3]))

    def _lacks_sender(self, lost: comparison.Difference) -> bool:
        """Return whether a lost message is one without a sender of a stream that is tracked."""
        stream, *_, reason = lost.text.split()
        return reason == "no_sender" and (
            self.tracked if stream == "S" else bool(self.second and self.second.inspect_field)
        )

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

    def _compare(self) -> list[comparison.Difference]:
        with open_fleet(self.home.folder) as opened:
            results = _Results(self.source, self.target, sorted({*self.targets}), opened)
            seen = [each for each in held_now(results, "S") if each.sequence not in self.gone]
            past = Past.of("S", self.held, "\n".join(self.log.lines), self.created)
            if self.gone:
                past = replace(past, blind=self._blind_spans(seen, results))
            every = [self.first_rules, *(rules for *_, rules in self.later)]
            compared = compare(
                results,
                replace(self.first_rules, later=tuple(self.later), acts=tuple(self.acts)),
                prefix="T.",
                target="T",
                feed="FEED" if any(each.inspect_field for each in every) else None,
                pasts={"S": past},
                whole_history=True,
                gone=len(self.gone),
                recovered=self.recovered,
            )
            self.outcome.messages = compared.messages
            self.outcome.transitions = len(compared.expected.advisories)
            fed = self.source.streams[self.followed].last
            differences = [*compared.differences, *self._compare_second(opened)]
            if len(past.held) > len(past.beginnings):
                # Nobody has known of what the source lost before it was noticed.
                differences = [each for each in differences if each.kind is not Kind.BLIND_WRONG]
            return [*differences, *(compare_feed(results, self.followed, None, fed) if self.centre else ())]

    def _compare_second(self, fleet: duckdb.DuckDBPyConnection) -> list[comparison.Difference]:
        """Compare the second stream, whose source loses nothing and whose rules stay."""
        if self.second is None:
            return []
        results = _Results(self.source, self.target, fleet=fleet, stream="Q")
        feed = "FEED" if self.second.inspect_field else None
        return compare(results, self.second, prefix="T.", target="T", feed=feed).differences

    def _compare_known(self) -> Iterator[comparison.Difference]:
        """Compare what a recovery knows without all of the source's messages: the copies and the advisories."""

        def by_key(messages: Iterable[Seen]) -> dict[tuple[int, int], Seen]:
            return {(message.sequence, message.stored_ns // 1_000_000): message for message in messages}

        results = _Results(self.source, self.target)
        read = by_key((*self.expired, *held_now(results, "S")))
        earlier = [by_key(held) for held in self.held]
        known = {key: message for each in (*earlier, read) for key, message in each.items()}
        made = Counter[tuple[int, int]]()
        for copy in results.copies("T"):
            origin = last_origin(copy.headers)
            assert origin is not None
            made[key := (origin.sequence, origin.stored_ms)] += 1
            if copy.payload != known[key].payload:
                yield comparison.Difference(Kind.ALTERED, f"{key} at {copy.sequence}")
        for key, message in known.items():
            # Each source that has held a message may have copied it (`on_source_reset: recopy`).
            if made[key] > sum(key in each for each in (*earlier, read)):
                yield comparison.Difference(Kind.DUPLICATE, f"{key}: {made[key]} copies")
            if key in read and not made[key] and not (self.tracked and by_field(message)):
                yield comparison.Difference(Kind.LOST, f"{key}: no copy")
        # Of what the source lost, the platform may have read nothing but the copied messages.
        yield from self._compare_told([message for key, message in known.items() if made[key] or key in read])

    def _compare_told(self, read: list[Seen]) -> Iterator[comparison.Difference]:
        """Compare the advisories with each other and with the messages: no node that reports is called silent or gone."""
        status: dict[str, str | None] = {}
        limits_ns = {"timeout": self.minutes * _MINUTE_NS // 2, "expire": self.minutes * _MINUTE_NS}
        for told in _Results(self.source, self.target).stored("FEED"):
            body = json.loads(told.payload)
            node, event = body["value"], body["event"]
            name = f"FEED {told.sequence}: {event} of {node}"
            if body["previous"] != status.get(node):
                yield comparison.Difference(Kind.TRANSITION_WRONG, f"{name}, which is {status.get(node)}")
            status[node] = STATUS[_EVENTS.index(event)].value
            event_ns = parse_rfc3339_ns(body["event_time"])
            heard_ns = [each.stored_ns for each in read if by_field(each) == node and each.stored_ns <= event_ns]
            # A copy's header names milliseconds.
            if event in limits_ns and heard_ns and event_ns - max(heard_ns) < limits_ns[event] - 1_000_000:
                yield comparison.Difference(Kind.TRANSITION_WRONG, f"{name}, which has reported at {max(heard_ns)}")

    def _blind_spans(self, seen: list[Seen], results: _Results) -> list[tuple[int, int]]:
        """Return the blind spans of the messages that the source lost before they were read."""
        (watermark_us,) = results.row("SELECT epoch_us(watermark) FROM replication WHERE stream = 'S'").values()
        return blind_spans(seen, self.gone, (watermark_us or 0) * 1000)


@dataclass(frozen=True)
class _Results:
    """What a simulated site has done."""

    source: Host
    target: Host
    targets: Collection[str] = ("T",)
    fleet: duckdb.DuckDBPyConnection | None = None
    #: The stream whose copies are compared.
    stream: str = "S"

    def rows(self, query: str) -> list[dict[str, Any]]:
        assert self.fleet is not None
        result = self.fleet.execute(query)
        names = [column[0] for column in result.description or ()]
        return [dict(zip(names, row, strict=True)) for row in result.fetchall()]

    def row(self, query: str) -> dict[str, Any]:
        (row,) = self.rows(query)
        return row

    def info(self, stream: str, /) -> Stream:
        return self.source.streams[stream]

    def stored(self, stream: str, server: Host | None = None, /) -> list[Message]:
        held = (server or self.source).streams.get(stream)
        messages = held.messages.values() if held else ()
        return [Message(each.sequence, each.at_ns, each.subject, each.headers, each.payload) for each in messages]

    def copies(self, stream: str, /) -> list[Message]:
        copies = [
            message._replace(subject=f"T.{message.subject.removeprefix(f'{name}.')}")
            for name in self.targets
            for message in self.stored(name, self.target)
            if message.subject.startswith(f"{name}.{self.stream}.")
        ]
        return sorted(copies, key=lambda copy: (copy.stored_ns, copy.sequence))
