"""The shared tables of `fleet.duckdb` as assets: "Materialize" publishes them again, and runs of sites record them.

Every run of a site publishes its rows itself, so that a failed stream does not hold back the rows of the others. It records
only the tables that have changed, because each event starts the assets downstream that follow the table.
"""

import math
from collections.abc import Collection, Generator, Iterator, Sequence
from typing import Final

import dagster as dg

from sr_assets.adapters import times
from sr_assets.adapters.home import open_home
from sr_assets.adapters.published.catalog import COLUMN_TYPES, ROWS
from sr_assets.adapters.published.fleet_file import Run, republish, table_versions
from sr_assets.adapters.published.fleet_reader import TableSummary, summarize_tables
from sr_assets.assets.freshness import TABLE_REPEATED, table_freshness
from sr_assets.assets.specs import (
    DATA_VERSION_TAG,
    ROW_COUNT,
    column_metadata,
    common_spec,
    markdown_table,
    materialized,
    native_keys,
    recorded,
    stream_key,
    table_io_manager,
    table_key,
)
from sr_assets.domain.errors import SrAssetsError
from sr_assets.resources import platform_of, resource_keys
from sr_assets.settings import Settings
from sr_assets.stages.clock import Clock
from sr_assets.stages.site import published_sites

#: Table → the stage that produces its rows.
_TABLE_STAGES: Final = {
    "last_seen_nodes": "node_state",
    "retired_nodes": "node_state",
    "node_availability": "node_state",
    "node_advisories": "node_advisories",
    "node_snapshots": "node_snapshots",
    "replication": "replica",
    "replication_partitions": "replica",
    "gaps": "replica",
    "parked_messages": "replica",
    "heartbeats": "replica",
    "hops": "replica",
    "site_summary": "node_state",
    "site_events": "node_state",
    "node_events": "node_state",
    "snapshot_info": "replica",
    "site_leaders": "replica",
    "operator_actions": "replica",
}
#: Tables about native streams and all links, assets only if native streams are configured.
_TOPOLOGY_TABLES: Final = ("topology_streams", "topology_links", "topology_drift")
#: Assets only if a feed is configured.
_GLOBAL_TABLES: Final = ("global_availability", "global_advisories", "global_summary", "global_rejects")
#: Dagster evaluates automation conditions every 30 s. `eager()` drops a change of a table in the evaluation that sees the
#: asset's own run, which is at most two evaluations after the change that started it.
_APART_SECONDS: Final = 60.0
_FIRST_ROWS: Final = 5
_LONGEST_CELL: Final = 40
#: Payloads stay out of Dagster's storage, whose readers `published_mode` does not restrict.
_NOT_SHOWN: Final = ("JSON", "BLOB")


def build_fleet_assets(settings: Settings, sites: Collection[str]) -> dg.AssetsDefinition:
    """Return the shared tables, which one run publishes together; they depend on the assets of these sites."""
    streams = [stream for stream in settings.streams if stream.name in sites]
    specs = {}
    for table, stage in _TABLE_STAGES.items():
        producers = [stream for stream in streams if stage == "replica" or stream.tracked]
        sources = [stream_key(settings, stream, stage) for stream in producers]
        specs[table] = _table_spec(settings, table, sources, table_freshness(settings, producers))
    if settings.feeds:
        feeds = [feed for feed in settings.feeds if feed.name in sites]
        sources = [stream_key(settings, feed, "advisory_feed") for feed in feeds]
        freshness = table_freshness(settings, feeds)
        specs |= {table: _table_spec(settings, table, sources, freshness) for table in _GLOBAL_TABLES}
    if native := native_keys(settings):
        specs |= {table: _table_spec(settings, table, native, None) for table in _TOPOLOGY_TABLES}

    @dg.multi_asset(
        name=settings.dagster.name("fleet_tables"),
        specs=list(specs.values()),
        can_subset=True,
        required_resource_keys=resource_keys(settings, "platform"),
    )
    def fleet_tables(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
        platform = platform_of(context, settings)
        configured = platform.settings
        try:
            open_home(configured.home, configured.published_mode)
            run = Run(Clock.own_ns(), context.run.run_id)
            republish(configured.home, published_sites(configured), run, configured.published_mode)
            versions, tables = table_versions(configured.home), summarize_tables(configured.home, _FIRST_ROWS)
        except SrAssetsError as error:
            raise dg.Failure(str(error), allow_retries=False) from None
        for table in specs:
            if table_key(settings, table) in context.selected_asset_keys:
                if table not in tables:
                    raise dg.Failure(f"the table {table} cannot be read; see the log", allow_retries=False)
                yield materialized(table_key(settings, table), _metadata(table, tables[table]), versions[table])

    return fleet_tables


def published_tables(
    settings: Settings, instance: dg.DagsterInstance, *, ended: bool = True
) -> Generator[dg.AssetMaterialization, None, bool]:
    """Yield the shared tables that the instance does not know as they are, as events of a site's run.

    A table last recorded an hour ago is yielded too; before the first publication, none is. Before the run has `ended`, a
    table that was recorded in the last minute waits. Return whether none waits.
    """
    published, known, now = table_versions(settings.home), _last_records(settings, instance), times.time()
    versions, waiting = {}, False
    for table in (*_TABLE_STAGES, *(_GLOBAL_TABLES if settings.feeds else ())):
        version, at = known.get(table, (None, -math.inf))
        age_seconds = now - at
        if table not in published or (version == published[table] and age_seconds < TABLE_REPEATED.total_seconds()):
            continue
        # A clock that was set back must not hold back a table.
        if not ended and 0 <= age_seconds < _APART_SECONDS:
            waiting = True
        else:
            versions[table] = published[table]
    try:
        tables = summarize_tables(settings.home, _FIRST_ROWS, versions) if versions else {}
    except SrAssetsError:
        # Before the first publication: the end of this run publishes the tables, or fails with the reason.
        return True
    for table, summary in tables.items():
        yield recorded(table_key(settings, table), _metadata(table, summary), versions[table])
    return not waiting


def _last_records(settings: Settings, instance: dg.DagsterInstance) -> dict[str, tuple[str | None, float]]:
    """Return the last recorded version of each table, and when it was recorded (unix seconds)."""
    keys = {table_key(settings, table): table for table in (*_TABLE_STAGES, *_GLOBAL_TABLES)}
    records = {}
    for record in instance.get_asset_records([*keys]):
        event = record.asset_entry.last_materialization
        if event and event.asset_materialization:
            version = (event.asset_materialization.tags or {}).get(DATA_VERSION_TAG)
            records[keys[record.asset_entry.asset_key]] = (version, event.timestamp)
    return records


def _metadata(table: str, summary: TableSummary) -> dict[str, dg.MetadataValue]:
    shown = [name for name, kind in COLUMN_TYPES[table].items() if kind not in _NOT_SHOWN]
    rows = [[_text(row[name]) for name in shown] for row in summary.first_rows]
    return {
        ROW_COUNT: dg.MetadataValue.int(summary.row_count),
        "first_rows": markdown_table(shown, rows),
    }


def _text(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= _LONGEST_CELL else f"{text[: _LONGEST_CELL - 1]}…"


def _table_spec(
    settings: Settings, table: str, deps: Sequence[dg.AssetKey], freshness: dg.FreshnessPolicy | None
) -> dg.AssetSpec:
    text, section = f"Table {table} of fleet.duckdb: one row per {ROWS[table]}.", "columns.md#tables-in-fleetduckdb"
    return dg.AssetSpec(
        table_key(settings, table),
        deps=deps,
        skippable=True,
        freshness_policy=freshness,
        **common_spec(settings, "fleet", {"duckdb"}, text, section, column_metadata(table)),
    ).with_io_manager_key(table_io_manager(settings))
