"""A published home whose nodes have a history, for tests of the daily tables."""

import json
import random
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from pyarrow import parquet

from sr_assets.adapters.published import history
from sr_assets.adapters.published.compaction import describe
from sr_assets.adapters.published.fleet_file import Run
from sr_assets.adapters.published.site_publishing import publish_site
from sr_assets.adapters.published.stream_status import PublishedStream
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.settings import Settings, load_settings

SITE, STREAM = "london", "REG"
SECOND, HOUR = 10**9, 3600 * 10**9
FIRST = date(2026, 1, 28)
BEGIN_NS = int(datetime(2026, 1, 28, tzinfo=UTC).timestamp()) * SECOND
DAY_NS = 24 * HOUR
AFTER = {"new": "up", "recover": "up", "timeout": "timeout", "expire": "retired"}
CODES = ("up", "timeout", "retired")


class Change(NamedTuple):
    """A transition: its time, its event, and the node's previous status."""

    at_ns: int
    event: str
    previous: str | None


Histories = dict[str, list[Change]]


class Message(NamedTuple):
    """A message of a node: its stored time and its JSON content, as a registration (`metadata`) or plain."""

    node: str
    at_ns: int
    content: object
    registration: bool = True


def random_histories(seed: int, nodes: int, until_ns: int) -> Histories:
    """Return random transitions at any nanosecond, some at midnight exactly."""
    chance = random.Random(seed)
    histories = {}
    for number in range(nodes):
        at_ns = BEGIN_NS + chance.randrange(-DAY_NS, 3 * DAY_NS)
        changes = [Change(at_ns, "new", None)]
        while True:
            step = chance.choice([chance.randrange(1, 50), chance.randrange(2 * HOUR), chance.randrange(2 * DAY_NS)])
            at_ns += step
            if chance.random() < 0.1:
                at_ns = at_ns // DAY_NS * DAY_NS + DAY_NS
            if at_ns > until_ns + HOUR:
                break
            status = AFTER[changes[-1].event]
            events = {"up": ["timeout"], "timeout": ["recover", "expire"], "retired": ["new"]}[status]
            changes.append(Change(at_ns, chance.choice(events), status))
        histories[f"node{number}"] = changes
    return histories


def configured(folder: Path, **more: str) -> Settings:
    file = folder / "replication.yaml"
    more |= {"name": "US-EAST"}
    stream = (
        f"{{name: {SITE}, stream: {STREAM}, source_url: a:1, target_url: b:1, inspect_field: s, inspect_duration: 1h}}"
    )
    lines = [f"streams: [{stream}]", *(f"{key}: {value}" for key, value in more.items())]
    file.write_text("\n".join(lines))
    return load_settings(file, {"SR_ASSETS_HOME": str(folder / "home")})


def publish(
    home: Path,
    histories: Histories,
    watermark_ns: int,
    spans: list[tuple[int, int]] | None = None,
    messages: Sequence[Message] = (),
    site: str = SITE,
) -> None:
    """Publish a site's nodes with their transitions, blind spans and messages."""
    rows = [
        {
            "event_id": f"{node}/{number}",
            "stream": STREAM,
            "node": node,
            "event": change.event,
            "event_ns": change.at_ns,
            "detected_ns": change.at_ns,
            "previous": change.previous,
            "transition": number,
            "epoch": 1,
        }
        for node, changes in histories.items()
        for number, change in enumerate(changes, 1)
    ]
    states = [
        {
            "node": node,
            "first_seen_ns": changes[0].at_ns,
            "seen_ns": changes[-1].at_ns,
            "sequence": 1,
            "copied_ns": None,
            "copied_bytes": None,
            "status": AFTER[changes[-1].event],
            "status_since_ns": changes[-1].at_ns,
            "retired_at_ns": changes[-1].at_ns if changes[-1].event == "expire" else None,
            "times_retired": 0,
            "transition": len(changes),
            "deadline_ns": None,
        }
        for node, changes in histories.items()
    ]
    with SiteState(home / "sites" / site) as state:
        with state.transaction():
            state.save_stream(StreamState(STREAM, 1, 8, watermark_ns=watermark_ns, as_of_ns=watermark_ns))
            if rows:
                state.connection.execute("DELETE FROM transitions")
                state.add_rows("transitions", pa.Table.from_pylist(rows))
                state.nodes(STREAM).merge(pa.Table.from_pylist(states))
            state.nodes(STREAM).save_blind_spans(spans or [])
            if messages:
                state.snapshot_index(STREAM).add(1, len(messages) + 1, [*map(describe, store(home, messages, site))])
        streams = [PublishedStream(STREAM, "COPY", tracked=True)]
        publish_site(home, site, state, streams, sites=[site], run=Run(watermark_ns, "run"))


def store(home: Path, messages: Sequence[Message], site: str = SITE) -> list[Path]:
    """Write messages into the Parquet history, one file per UTC date; return the files."""
    by_date: dict[str, list[dict[str, object]]] = {}
    for sequence, message in enumerate(messages, 1):
        text = json.dumps(message.content)
        stored_at = datetime.fromtimestamp(message.at_ns // SECOND, UTC).replace(
            microsecond=message.at_ns % SECOND // 1000
        )
        row = {
            "node": message.node,
            "sequence": sequence,
            "stored_at": stored_at,
            "payload": "{}" if message.registration else text,
            "metadata": text if message.registration else None,
        }
        by_date.setdefault(stored_at.date().isoformat(), []).append(row)
    files = []
    for when, rows in by_date.items():
        file = history.stream_folder(home, site, STREAM) / f"date={when}" / f"1-{len(messages) + 1}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.Table.from_pylist(rows, schema=history.SCHEMA), file)
        files.append(file)
    return files


def publish_centre(home: Path, histories: Histories, watermark_ns: int) -> None:
    """Publish a centre whose feed has every transition of site `paris`, which last reported the watermark."""
    key = {"feed": "ADVISORIES", "replicator": "EU", "name": "paris", "stream": STREAM}
    codes = {"new": 0, "timeout": 1, "recover": 2, "expire": 3}
    rows = [
        {
            **key,
            "node": node,
            "event_id": f"{node}/{number}",
            "event_code": codes[change.event],
            "event_ns": change.at_ns,
            "received_ns": change.at_ns,
            "previous": change.previous,
            "epoch_ns": 1,
            "transition": number,
            "origin": "ours",
        }
        for node, changes in histories.items()
        for number, change in enumerate(changes, 1)
    ]
    newest = {row["node"]: row for row in rows}
    nodes = [{name: row[name] for name in row if name not in ("event_id", "previous")} for row in newest.values()]
    with SiteState(home / "sites" / "centre") as state:
        with state.transaction():
            state.save_stream(StreamState("ADVISORIES", 1, 8, watermark_ns=watermark_ns, as_of_ns=watermark_ns))
            state.add_rows("global_history", pa.Table.from_pylist(rows))
            state.add_rows("global_nodes", pa.Table.from_pylist(nodes))
            state.add_rows("global_sites", pa.Table.from_pylist([{**key, "watermark_ns": watermark_ns}]))
        streams = [PublishedStream("ADVISORIES", None, tracked=False)]
        publish_site(home, "centre", state, streams, sites=[SITE, "centre"], run=Run(watermark_ns, "run"))
