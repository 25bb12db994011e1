"""A published home whose nodes have a history, for tests of the daily tables."""

import json
import random
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest
from pyarrow import parquet

from sr_assets.adapters.published import history, site_publishing
from sr_assets.adapters.published.compaction import describe
from sr_assets.adapters.published.fleet_file import Run, view_files
from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.adapters.published.site_publishing import publish_site
from sr_assets.adapters.published.stream_status import PublishedStream
from sr_assets.adapters.state.operator_settings import add_windows
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.tracking.maintenance import Window
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


def random_messages(chance: random.Random, histories: Histories, until_ns: int) -> list[Message]:
    """Return messages of the nodes while they are up; some nodes send rarely, some change their values."""
    messages = []
    for node, changes in histories.items():
        interval_ns = chance.choice([HOUR, HOUR, 30 * HOUR])
        country = chance.choice(["uk", "fr", None])
        for change, end in zip(changes, [*(later.at_ns for later in changes[1:]), until_ns + HOUR], strict=True):
            at_ns = change.at_ns
            while AFTER[change.event] == "up" and at_ns < end:
                version = chance.choice(["0.30.2", "0.31.0"])
                content = {
                    "classes": chance.sample(["web", "db", "base"], chance.randrange(4)),
                    "agents": [{"name": "rpcutil", "version": version}, {"name": "puppet"}],
                    "build_info": {"version": version},
                    "facts": {"country": country, "os": {"family": chance.choice(["Debian", "RedHat"])}, "a.b": [7]},
                }
                messages.append(Message(node, at_ns, content))
                at_ns += chance.randrange(1, 2 * interval_ns)
    chance.shuffle(messages)
    return messages


def varied_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A home with a name of many characters, and everything that daily tables are computed from.

    Random nodes at sites and at a feed's site, a forgotten node, one with expired advisories, an undone retirement, blind spans,
    maintenance windows, messages, rows that replace others, and days of a time zone.
    """
    # Each table has a base file.
    monkeypatch.setattr(site_publishing, "LARGE", 1)
    folder /= "it's [a] hömé {1}"
    folder.mkdir()
    more = {"availability": "{timezone: America/New_York}", "inventory": r"{facts: [country, 'a\.b.0']}"}
    settings = configured(folder, **more)
    watermark_ns = BEGIN_NS + 4 * DAY_NS + 7 * HOUR
    histories = random_histories(5, 40, watermark_ns)
    histories["undone"] = [Change(BEGIN_NS, "new", None), Change(BEGIN_NS + HOUR, "expire", "up")]
    messages = random_messages(random.Random(5), histories, watermark_ns)
    spans = [(BEGIN_NS + hours * HOUR, BEGIN_NS + (hours + 5) * HOUR + 1) for hours in (3, 30)]
    publish_centre(settings.home, random_histories(6, 20, watermark_ns), watermark_ns)
    with SiteState(settings.home / "sites" / "centre") as state:
        with state.transaction():
            change = f"REPLACE ({watermark_ns + DAY_NS} AS received_ns, event_ns + {HOUR} AS event_ns)"
            state.connection.execute(
                f"CREATE TEMP TABLE newer AS SELECT * {change} FROM global_nodes WHERE node < 'node2'"
            )
            state.connection.execute("DELETE FROM global_nodes WHERE node < 'node2'")
            state.connection.execute("INSERT INTO global_nodes BY NAME FROM newer")
            state.connection.execute("DELETE FROM global_history WHERE node = 'node1'")
        streams = [PublishedStream("ADVISORIES", None, tracked=False)]
        publish_site(settings.home, "centre", state, streams, sites=["centre"], run=Run(watermark_ns, "again"))
    publish(settings.home, histories, watermark_ns, spans, messages, site="köln")
    publish(settings.home, histories, watermark_ns, spans, messages)
    with SiteState(settings.home / "sites" / SITE) as state:
        with state.transaction():
            state.outbox(STREAM).undo("undone", 2, BEGIN_NS + 2 * HOUR)
            state.connection.execute("UPDATE nodes SET status = 'up', retired_at_ns = NULL WHERE node = 'undone'")
            state.connection.execute("DELETE FROM nodes WHERE node = 'node7'")
        streams = [PublishedStream(STREAM, "COPY", tracked=True)]
        sites = [SITE, "köln", "centre"]
        publish_site(settings.home, SITE, state, streams, sites=sites, run=Run(watermark_ns, "again"))
        with state.transaction():
            later = f"status_since_ns = {watermark_ns + HOUR}"
            state.connection.execute(f"UPDATE nodes SET status = 'timeout', {later} WHERE node = 'node8'")
            retired = f"status = 'retired', retired_at_ns = {watermark_ns + HOUR}, {later}"
            state.connection.execute(f"UPDATE nodes SET {retired} WHERE node = 'node9'")
        publish_site(settings.home, SITE, state, streams, sites=sites, run=Run(watermark_ns, "later"))
    windows = [
        Window("1", ("node1*",), BEGIN_NS + HOUR, BEGIN_NS + 3 * HOUR),
        Window("2", (), cron="0 3 * * *", length_ns=2 * HOUR),
    ]
    add_windows(settings.home / "sites" / SITE, windows)
    with open_fleet(settings.home) as connection:
        for table in ("global_availability", "last_seen_nodes"):
            assert all(view_files(connection, table)), "there are no rows that replace others"
    return settings
