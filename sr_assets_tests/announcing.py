"""Histories of sightings folded into a state in any batches, and a naive fold of the rules of operators."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.blindness import BlindSpans
from sr_assets.domain.tracking.rows import folded_table, node_row, node_table, transition_row
from sr_assets.domain.tracking.rules import NodeState, Policy, Sighting, Transition, sight, sweep
from sr_assets.settings import StreamSettings, load_settings
from sr_assets.stages.report import StreamReport
from sr_assets.stages.tracking.batch_rows import add_transitions
from sr_assets.stages.tracking.node_state import sweep_due

SECOND = 10**9
#: A Saturday.
BEGIN = datetime(2026, 1, 3, tzinfo=UTC)
BEGIN_NS = int(BEGIN.timestamp()) * SECOND
POLICY = Policy(20 * SECOND, 10 * SECOND)
#: A node, an event, and its second.
Row = tuple[str, str, int]


def at(seconds: float) -> str:
    """Return a time of the histories as in the configuration."""
    return (BEGIN + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def configured(
    folder: Path, *windows: dict[str, Any], top: dict[str, Any] | None = None, **keys: Any
) -> StreamSettings:
    """Return a stream with windows of the top level, and with other keys."""
    entry = {"stream": "REG", "source_url": "nats://a:1", "target_url": "nats://b:1", "target_stream": "COPY"}
    tracked = {"inspect_field": "sender", "inspect_duration": "20s", "advisory": {"subject": "adv.%s.%v"}}
    file = folder / "replication.yaml"
    document = {
        "name": "london",
        "maintenance": list(windows),
        "streams": [{**entry, **tracked, **keys}],
        **(top or {}),
    }
    file.write_text(json.dumps(document))
    return load_settings(file, {"SR_ASSETS_HOME": str(folder)}).streams[0]


def fold(
    state: SiteState, stream: StreamSettings, sightings: Sequence[tuple[int, str]], cuts: Sequence[int], end: int
) -> None:
    """Fold sightings (second, node) in batches that end before each cut, sweeping after each batch.

    Classes have globs.
    """
    known: dict[str, NodeState] = {row[0]: NodeState(*row[2:]) for row in state.nodes("REG").all_states()}
    classifier = stream.node_classes.classifier if stream.node_classes else None
    nodes = {*known, *(node for _, node in sightings)}
    kinds = {node: classifier.reclassify(node, None) if classifier else None for node in nodes}
    policies = {node: stream.policy_of(kind) for node, kind in kinds.items()}
    row = StreamState("REG", 1, 1, epoch_ns=1)
    first = -1
    for cut in (*sorted(cuts), end):
        transitions: list[tuple[str, Transition]] = []
        batch = [(second, node) for second, node in sightings if first <= second < cut]
        for second, node in batch:
            sighting = Sighting(second, BEGIN_NS + second * SECOND, 1, False)
            known[node], _, new = sight(policies[node], 0, known.get(node), sighting, BlindSpans())
            transitions += [(node, each) for each in new]
        row.watermark_ns = row.planned_ns = BEGIN_NS + cut * SECOND
        with state.transaction():
            if stream.guard is not None:
                times = pa.array([BEGIN_NS + second * SECOND for second, _ in batch], pa.int64())
                state.guard("REG").add(
                    pa.table({"sender": pa.array([node for _, node in batch], pa.string()), "stored_ns": times})
                )
            state.save_stream(row)
            if known:
                rows = [node_row(policies[node], node, each, BlindSpans(), kinds[node]) for node, each in known.items()]
                state.nodes("REG").merge(node_table(rows))
            table = folded_table([transition_row(node, each, kinds[node]) for node, each in transitions])
            add_transitions(state, stream, row, table, StreamReport(stream))
        sweep_due(state, stream, POLICY, StreamReport(stream), at_once=1)
        known = {node: sweep(policies[node], each, row.watermark_ns, BlindSpans())[0] for node, each in known.items()}
        first = cut


def outbox(state: SiteState) -> list[Row]:
    """Return the announced transitions."""
    return [
        (row["node"], row["event"], (row["event_ns"] - BEGIN_NS) // SECOND)
        for row in state.outbox("REG").unpublished(999)
    ]


def history(state: SiteState) -> list[Row]:
    """Return all transitions."""
    query = "SELECT node, event, (event_ns - ?) // ? FROM transitions ORDER BY event_ns, node, transition"
    return state.connection.execute(query, [BEGIN_NS, SECOND]).fetchall()


def site_events(state: SiteState) -> list[tuple[str, int, int, int, int]]:
    """Return the site events: event, second, nodes, silent, since."""
    query = """
        SELECT event, (event_ns - $begin) // $second, nodes, silent, (since_ns - $begin) // $second FROM site_events
        ORDER BY event_ns, event <> 'restored'
        """
    return state.connection.execute(query, {"begin": BEGIN_NS, "second": SECOND}).fetchall()


@dataclass
class NaiveGuard:
    """The outage guard, told step by step; times in seconds, shares in percent."""

    partial: int
    dark: int
    quiet: int
    hold: int
    min_nodes: int
    seen: dict[str, int] = field(default_factory=dict)
    up: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    events: list[tuple[str, int, int, int, int]] = field(default_factory=list)
    #: Began, since, dark, ended.
    outages: list[list[Any]] = field(default_factory=list)
    #: The outage of each held timeout or expiry.
    holding: dict[Row, int] = field(default_factory=dict)

    def run(self, sightings: Sequence[tuple[int, str]], rows: Sequence[Row], end: int) -> None:
        """Pass the seconds in order; in each one the sightings come first, the expiries last."""
        for second in range(end):
            if self._running() and second >= self._running()[0] + self.hold:
                self.held.clear()
            sighted = {node for when, node in sightings if when == second}
            for node in sighted:
                self.seen[node] = second
                self.up.add(node)
                self.held.discard(node)
            if sighted and self._running() and second > self._running()[0]:
                self._restore(second)
            for node, event, when in sorted(rows, key=lambda row: row[1] == "expire"):
                if when == second and event == "timeout":
                    self._time_out(node, second)
                elif when == second and event == "expire" and self._holds(second):
                    self.holding[node, event, second] = len(self.outages) - 1

    def _running(self) -> list[Any]:
        return self.outages[-1] if self.outages and self.outages[-1][3] is None else []

    def _holds(self, second: int) -> bool:
        return bool(self._running()) and second < self._running()[0] + self.hold

    def _counts(self, second: int) -> tuple[int, list[str]]:
        nodes = self.up | self.held
        return len(nodes), [node for node in nodes if second - self.seen[node] > self.quiet]

    def _restore(self, second: int) -> None:
        nodes, silent = self._counts(second)
        if len(silent) * 100 < self.partial * nodes:
            self.events.append(("restored", second, nodes, len(silent), self.outages[-1][1]))
            self.outages[-1][3] = second
            self.held.clear()

    def _time_out(self, node: str, second: int) -> None:
        nodes, silent = self._counts(second)
        dark = len(silent) * 100 >= self.dark * nodes
        since = min((self.seen[each] for each in silent), default=0)
        if not self._running() and nodes >= self.min_nodes and len(silent) * 100 >= self.partial * nodes:
            self.events.append(("dark" if dark else "partial", second, nodes, len(silent), since))
            self.outages.append([second, since, dark, None])
        elif self._running() and dark and not self._running()[2]:
            self.events.append(("dark", second, nodes, len(silent), since))
            self.outages[-1][2] = True
        self.up.discard(node)
        if self._holds(second):
            self.held.add(node)
            self.holding[node, "timeout", second] = len(self.outages) - 1
