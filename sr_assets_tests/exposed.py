"""A home with data for every metric: two sites, partitions, a centre, links and heartbeats, without a server."""

import time
from pathlib import Path
from typing import Any

import duckdb
import yaml

from sr_assets.adapters.published.tables import SCHEMA_VERSION, SNAPSHOT_INFO
from sr_assets.adapters.state.status_file import SiteStatus, StreamStatus, write_status
from sr_assets.settings import Settings, load_settings

REPLICATOR, STREAM, SITES = "HUB", "REG", ("london", "paris")
_COPIED_TOO = ("processing_seconds", "errors", "connection_errors", "connections_closed", "reconnections")
_EVENTS = ("new", "timeout", "recover", "expire")
_TABLES = f"""
CREATE TABLE snapshot_info ({SNAPSHOT_INFO});
INSERT INTO snapshot_info VALUES (now(), 'run', {SCHEMA_VERSION}, 'generation', 'leader', NULL);
CREATE TABLE global_summary AS SELECT 'EDGE' AS replicator, NULL::VARCHAR AS name, 'REG' AS stream, 3 AS up,
    1 AS timeout, 2 AS retired, true AS blind, now() - INTERVAL 90 SECOND AS observer_alive_at;
CREATE TABLE topology_links AS SELECT 'hub' AS cluster, 'ALL' AS stream, 'mirror' AS kind, 'edge' AS origin_cluster,
    'REG' AS origin_stream, 7::BIGINT AS lag_messages, 2.5 AS active_seconds
    UNION ALL SELECT 'hub', 'ALL', 'source', 'edge', 'OTHER', NULL, NULL;
CREATE TABLE heartbeats AS SELECT 'london' AS name, 'HB' AS stream, 'hb."a"' AS subject,
    now() - INTERVAL 30 SECOND AS arrived_at, 0.1 AS p50_seconds, 0.2 AS p95_seconds, 0.4 AS max_seconds;
CREATE TABLE replication_partitions AS SELECT 'london' AS name, 'REG' AS stream, unnest([0, 1]) AS partition,
    41::BIGINT AS next_sequence, unnest([5, NULL])::BIGINT AS lag_messages, now() - INTERVAL 20 SECOND AS watermark,
    unnest(['reg.0.>', 'reg.1.>']) AS subject;
CREATE TABLE hops AS SELECT 'london' AS name, 'REG' AS stream, 1.5 AS p50_seconds, 2.5 AS p95_seconds, 4.5 AS max_seconds
"""


def configured(home: Path, *sites: str, **top: Any) -> Settings:
    """Return a configuration of one plain stream at each site."""
    return _load(home, [_entry(site) for site in sites or SITES[:1]], top)


def expose_tables(home: Path) -> None:
    """Publish the tables of two partitions (one without a lag), a blind site, two links (one unknown), one heartbeat."""
    with duckdb.connect(str(home / "fleet.duckdb")) as fleet:
        fleet.execute(_TABLES)


def expose_everything(home: Path, **top: Any) -> Settings:
    """Publish data for every metric and return the configuration: each site has a sampled stream with advisories."""
    expose_tables(home)
    advance_counters(home, 1)
    sampled = {"inspect_field": "sender", "inspect_duration": "1h", "advisory": {"subject": "adv.%s.%v"}}
    return _load(home, [{**_entry(site), **sampled} for site in SITES], top)


def advance_counters(home: Path, step: int) -> None:
    """Advance every counter of the streams to a step."""
    now_ns, count = time.time_ns(), 100 * step
    status = {
        **dict.fromkeys(("seen_messages", "copied_messages", "copied_bytes", "skipped_messages"), count),
        **dict.fromkeys(("too_old_messages", "no_sender_messages", "gap_messages", "parked_messages"), count),
        "created_ns": 1,
        "next_sequence": count + 1,
        "watermark_ns": now_ns,
        "last_success_ns": now_ns,
        "lag_messages": 3,
        "lag_ns": 4_500_000_000,
        "unpublished": 2,
        "queued": 5,
        "up": 8,
        "timeout": 1,
        "counters": {
            **{name: {"": count} for name in ("seen_bytes", "skipped_bytes", "forced_messages", "processed_messages")},
            **{name: {"": count, "copying": count} for name in _COPIED_TOO},
            **{name: dict.fromkeys(_EVENTS, count) for name in ("advisories", "advisory_errors")},
        },
    }
    for site in SITES:
        write_stream(home, site, status)


def write_stream(home: Path, site: str, status: dict[str, Any]) -> Path:
    """Write the status of a site's only stream; returns the site's folder."""
    folder = home / "sites" / site
    folder.mkdir(parents=True, exist_ok=True)
    write_status(folder, SiteStatus({STREAM: StreamStatus.from_json(status)}))
    return folder


def _entry(site: str) -> dict[str, Any]:
    return {"stream": STREAM, "name": site, "source_url": "a:1", "target_url": "b:1", "target_stream": f"{site}_COPY"}


def _load(home: Path, entries: list[dict[str, Any]], top: dict[str, Any]) -> Settings:
    file = home / "replication.yaml"
    file.write_text(yaml.safe_dump({"name": REPLICATOR, "state_store": str(home), "streams": entries, **top}))
    return load_settings(file, {})
