"""The shared tables of `fleet.duckdb` as assets: what is published, recorded with its row counts.

Here: their specs, and how they are recorded: by every run of a site, or materialised by hand. Not here: the publishing,
which every run of a site does itself as it ends (`stages.site`), so that a failed stream does not hold back the others' rows.
"""

from collections.abc import Iterator, Sequence

import dagster as dg

from sr_assets.adapters.published.reading import describe_tables
from sr_assets.assets.described import documented, table_metadata
from sr_assets.assets.streams import OWNERS, native_keys, stream_key
from sr_assets.domain.errors import SrAssetsError
from sr_assets.settings import Settings, StreamSettings

#: table → (the stage that makes its rows, what one row is of)
_TABLE_ROWS = {
    "last_seen_nodes": ("node_state", "tracked node that is not retired"),
    "retired_nodes": ("node_state", "retired node"),
    "node_availability": ("node_state", "node ever tracked"),
    "node_advisories": ("node_advisories", "transition"),
    "node_snapshots": ("node_snapshots", "node: its newest copied message"),
    "replication": ("replica", "stream"),
    "gaps": ("replica", "hole in a source"),
    "parked_messages": ("replica", "message that a target cannot take"),
    "heartbeats": ("replica", "heartbeat subject and hop"),
    "site_summary": ("node_state", "site and stream"),
    "snapshot_info": ("replica", "publication: only the last"),
}
#: table of native streams and of all links → what one row is of; these are assets only with native streams.
_TOPOLOGY_ROWS = {
    "topology_streams": "stream of a cluster that the configuration names",
    "topology_links": "mirror, source, replica or feed",
    "topology_drift": "difference between a native stream that is wanted and the one that is there",
}
#: global table → what one row is of; these are assets only where there is a feed.
_GLOBAL_ROWS = {
    "global_availability": "node ever reported, at each site",
    "global_advisories": "advisory of any site",
    "global_summary": "site and stream, with the state of its heartbeat",
    "global_rejects": "message of a feed that is no advisory",
}


def table_key(table: str) -> dg.AssetKey:
    """Return the key `["fleet", table]`."""
    return dg.AssetKey(["fleet", table])


def build_fleet_assets(settings: Settings) -> dg.AssetsDefinition:
    """Return the shared tables; needs the resource `platform`."""
    specs = {
        table: _table_spec(
            table, row, [stream_key(stream, stage) for stream in settings.streams if _has(stream, stage)]
        )
        for table, (stage, row) in _TABLE_ROWS.items()
    }
    if settings.feeds:
        sources = [stream_key(feed, "advisory_feed") for feed in settings.feeds]
        specs |= {table: _table_spec(table, row, sources) for table, row in _GLOBAL_ROWS.items()}
    if native := native_keys(settings):
        specs |= {table: _table_spec(table, row, native) for table, row in _TOPOLOGY_ROWS.items()}

    @dg.multi_asset(
        name="fleet_tables",
        specs=list(specs.values()),
        can_subset=True,
        required_resource_keys={"platform"},
    )
    def fleet_tables(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
        try:
            tables = describe_tables(context.resources.platform.settings.home)
        except SrAssetsError as error:
            raise dg.Failure(str(error), allow_retries=False) from None
        for table in specs:
            if table_key(table) in context.selected_asset_keys:
                rows, columns = tables.get(table, (0, {}))
                yield dg.MaterializeResult(table_key(table), metadata=table_metadata(columns, rows))

    return fleet_tables


def published_tables(settings: Settings) -> Iterator[dg.AssetMaterialization]:
    """Yield the shared tables as events of a site's run, which publishes them; none while nothing is published."""
    try:
        tables = describe_tables(settings.home)
    except SrAssetsError:
        # Nothing is published yet: the end of this run publishes the tables, or fails and says why.
        return
    for table in (*_TABLE_ROWS, *(_GLOBAL_ROWS if settings.feeds else ())):
        rows, columns = tables[table]
        yield dg.AssetMaterialization(table_key(table), metadata=table_metadata(columns, rows))


def _has(stream: StreamSettings, stage: str) -> bool:
    """Return whether a stream has the asset of a stage: without senders it has its replica alone."""
    return stage == "replica" or stream.tracked


def _table_spec(table: str, row: str, deps: Sequence[dg.AssetKey]) -> dg.AssetSpec:
    return dg.AssetSpec(
        table_key(table),
        deps=deps,
        description=documented(
            f"Table {table} of fleet.duckdb: one row per {row}.", "contract.md#tables-in-fleetduckdb"
        ),
        group_name="fleet",
        kinds={"duckdb"},
        owners=OWNERS,
        skippable=True,
    )
