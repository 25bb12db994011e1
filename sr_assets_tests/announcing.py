"""Histories of sightings folded into a state in any batches."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.blindness import BlindSpans
from sr_assets.domain.tracking.rows import folded_table, node_row, node_table, state_of, transition_row
from sr_assets.domain.tracking.rules import NodeState, Policy, Sighting, Transition, sight, sweep
from sr_assets.settings import StreamSettings, load_settings
from sr_assets.stages.report import StreamReport
from sr_assets.stages.tracking.batch_rows import add_transitions
from sr_assets.stages.tracking.node_state import sweep_due
from sr_assets_tests.naive_rules import Row

SECOND = 10**9
#: A Saturday.
BEGIN = datetime(2026, 1, 3, tzinfo=UTC)
BEGIN_NS = int(BEGIN.timestamp()) * SECOND
POLICY = Policy(20 * SECOND, 10 * SECOND)


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
    known: dict[str, NodeState] = {row[0]: state_of(row[2:]) for row in state.nodes("REG").all_states()}
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
