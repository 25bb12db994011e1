"""The daily tables as assets: a partition for each day, any number of consecutive days in one run.

Add a daily table here. No `from __future__ import annotations`: Dagster reads the annotations of an asset's function.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Final

import dagster as dg

from sr_assets.adapters import times
from sr_assets.adapters.published import availability as availability_queries
from sr_assets.adapters.published import inventory as inventory_queries
from sr_assets.adapters.published.catalog import ROWS
from sr_assets.adapters.published.fleet_reader import Rows
from sr_assets.adapters.published.queries import unfinished_dates
from sr_assets.adapters.published.status_queries import recent_nodes, site_outages
from sr_assets.adapters.spark.run_session import SparkConnection, engine_of
from sr_assets.assets.charts import line_chart, nodes_chart
from sr_assets.assets.checks import check_specs
from sr_assets.assets.freshness import DAILY
from sr_assets.assets.specs import ROW_COUNT, beta_allowed, column_metadata, common_spec, table_io_manager, table_key
from sr_assets.domain.days import Day, day_of
from sr_assets.domain.errors import SrAssetsError
from sr_assets.resources import platform_of, resource_keys, spark_of
from sr_assets.settings import Settings
from sr_assets.stages.daily_computation import AVAILABILITY_STAGE, INVENTORY_STAGE, DailyStage
from sr_assets.stages.tracking.windows import active_spans

_CHART_DAYS: Final = 30
_WORST_NODES: Final = 10
_OUTAGES: Final = 20
_VERSIONS: Final = 6
_VALUES_PER_PROPERTY: Final = 5


@dataclass(frozen=True)
class DailyAsset:
    """The asset of a daily table.

    `sources` returns the assets that the table is computed from. `checks` has each check's description, and a function that
    counts the wrong rows of a day. `metadata` returns a chart and a table for a run, from its last day. `lineage` has, by
    column, the tables and columns that it comes from.
    """

    stage: DailyStage
    sources: Callable[[Settings], list[dg.AssetKey]]
    checks: Mapping[str, tuple[str, Callable[[Path, Day], int]]]
    metadata: Callable[[Settings, date], dict[str, Any]]
    lineage: Mapping[str, Sequence[tuple[str, str]]]

    def key(self, settings: Settings) -> dg.AssetKey:
        """Return the table's key."""
        return table_key(settings, self.stage.table.name)


def build_daily_asset(settings: Settings, daily: DailyAsset, *, may_use_spark: bool) -> dg.AssetsDefinition:
    """Return a table's asset; one run computes any number of consecutive days. Its kinds show whether it `may_use_spark`."""
    stage, key = daily.stage, daily.key(settings)
    # From the earliest day that exists or can be computed until today.
    first, zone = stage.first_date(settings, times.time_ns()), stage.settings(settings).timezone
    days = dg.DailyPartitionsDefinition(start_date=first.isoformat(), timezone=zone, end_offset=1)

    def compute(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None] | dg.AssetCheckResult]:
        platform = platform_of(context, settings)
        spark = spark_of(context, settings)
        configured = platform.settings
        dates = sorted(date.fromisoformat(key) for key in context.partition_keys)
        try:
            engine = engine_of(spark, configured.home.resolve())
            kept = _unrecorded_days(context.instance, daily, configured, dates)
            rows, in_spark = dict[date, int](), False
            with closing(SparkConnection(engine, configured.spark.from_messages, stage.table.computed)) as connection:
                for span in _spans([day for day in dates if day not in kept]):
                    computed = stage.compute_days(configured, span, connection)
                    rows, in_spark = rows | computed.rows, in_spark or computed.in_spark
            metadata = {
                ROW_COUNT: sum(rows.values()) + (stage.table.count_rows(configured.home, kept) if kept else 0),
                "days": len(rows),
                "kept_days": len(kept),
                "computed_in": "Spark" if in_spark else "the run's process",
                **daily.metadata(configured, dates[-1]),
            }
            if expired := [day.isoformat() for day in dates if day not in rows and day not in kept]:
                metadata["not_computable"] = f"{', '.join(expired)}: the input has expired"
            days_of_rows = [day_of(day, stage.settings(configured).timezone) for day in rows]
            check_results = list(_check_results(daily, configured, days_of_rows))
        except SrAssetsError as error:
            raise dg.Failure(str(error), allow_retries=False) from None
        yield dg.MaterializeResult(key, metadata=metadata)
        yield from check_results

    # Only a backfill policy computes many days in one run.
    with beta_allowed():
        asset: dg.AssetsDefinition = dg.asset(
            key=key,
            required_resource_keys=resource_keys(settings, "platform", "spark"),
            deps=daily.sources(settings),
            partitions_def=days,
            backfill_policy=dg.BackfillPolicy.single_run(),
            check_specs=check_specs(key, {name: text for name, (text, _) in daily.checks.items()}),
            freshness_policy=DAILY,
            io_manager_key=table_io_manager(settings),
            **common_spec(
                settings,
                "fleet",
                ["duckdb", "spark"] if may_use_spark else ["duckdb"],
                f"Table {stage.table.name} of fleet.duckdb: one row per {ROWS[stage.table.name]}.",
                f"daily.md#{stage.table.computed}-by-day",
                {**column_metadata(stage.table.name), "dagster/column_lineage": _lineage(settings, daily)},
            ),
        )(compute)
    return asset


def _unrecorded_days(
    instance: dg.DagsterInstance, daily: DailyAsset, settings: Settings, dates: Sequence[date]
) -> set[date]:
    """Return the days whose rows are final and that only the instance does not know: it is new, or lost its events.

    "Materialize missing" records them. A day that it knows is computed again: somebody wants that.
    """
    table, home, key = daily.stage.table, settings.home, daily.key(settings)
    if not (final := set(dates).intersection(table.computed_dates(home))):
        return final
    final -= {when for when, _ in unfinished_dates(home, table)}
    return {
        when
        for when in final
        if not instance.fetch_materializations(
            dg.AssetRecordsFilter(key, asset_partitions=[when.isoformat()]), limit=1
        ).records
    }


def _spans(dates: Sequence[date]) -> list[list[date]]:
    """Return ordered days as lists of consecutive ones."""
    spans: list[list[date]] = []
    for when in dates:
        if spans and when - spans[-1][-1] == timedelta(days=1):
            spans[-1].append(when)
        else:
            spans.append([when])
    return spans


def _lineage(settings: Settings, daily: DailyAsset) -> dg.TableColumnLineage:
    return dg.TableColumnLineage(
        {
            column: [dg.TableColumnDep(table_key(settings, table), of) for table, of in origins]
            for column, origins in daily.lineage.items()
        }
    )


def _check_results(daily: DailyAsset, settings: Settings, days: list[Day]) -> Iterator[dg.AssetCheckResult]:
    for name, (_, count_wrong) in daily.checks.items():
        wrong = sum(count_wrong(settings.home, day) for day in days)
        yield dg.AssetCheckResult(
            asset_key=daily.key(settings), check_name=name, passed=wrong == 0, metadata={"wrong": wrong}
        )


def _availability_sources(settings: Settings) -> list[dg.AssetKey]:
    tables = ["node_availability", "node_advisories", *(["global_advisories"] if settings.feeds else [])]
    return [table_key(settings, table) for table in tables]


def _availability_metadata(settings: Settings, last: date) -> dict[str, Any]:
    """Return charts of the last days and of the last hours, and tables of the outages and of the least available nodes."""
    since = last - timedelta(days=_CHART_DAYS - 1)
    lines: dict[str, list[tuple[str, float]]] = {"": []}
    maintained: list[tuple[str, float]] = []
    for day, node_class, available, covered in availability_queries.shares_by_day(settings.home, since).values:
        if available is not None:
            lines.setdefault(node_class or "", []).append((str(day), available))
        if node_class is None:
            maintained.append((str(day), covered or 0.0))
    if len(lines) > 1:
        lines = {"all nodes": lines.pop(""), **{f"class {name}": points for name, points in lines.items()}}
    worst = availability_queries.availability(settings.home, by="node", since=since, most=_WORST_NODES)
    metadata = {"availability": line_chart("availability by day", "availability, %", lines)}
    if any(share for _, share in maintained):
        metadata["maintenance"] = line_chart("maintenance by day", "maintenance, %", {"": maintained})
    recent = recent_nodes(settings.home)
    metadata["nodes"] = nodes_chart(recent, active_spans(settings, recent))
    outages = site_outages(settings.home, since, _OUTAGES)
    return {**metadata, **({"outages": _table(outages)} if outages.values else {}), "worst_nodes": _table(worst)}


def _inventory_metadata(settings: Settings, last: date) -> dict[str, Any]:
    """Return a chart of the agent versions of the last days, and a table of the most frequent values of the last day."""
    since = last - timedelta(days=_CHART_DAYS - 1)
    lines: dict[str, list[tuple[str, float]]] = {}
    counts = inventory_queries.values_by_day(settings.home, "agent_version", since, _VERSIONS)
    for day, version, nodes in counts.values:
        lines.setdefault(version, []).append((str(day), nodes))
    return {
        "versions": line_chart("nodes by agent version", "nodes", lines),
        "values": _table(inventory_queries.values_of_day(settings.home, last, _VALUES_PER_PROPERTY)),
    }


def _table(rows: Rows) -> dg.TableMetadataValue:
    records = [
        dg.TableRecord({name: _cell(value) for name, value in zip(rows.columns, row, strict=True)})
        for row in rows.values
    ]
    return dg.MetadataValue.table(records, schema=dg.TableSchema([dg.TableColumn(name) for name in rows.columns]))


def _cell(value: object) -> str | float | int | bool | None:
    return value if value is None or isinstance(value, str | int | float) else str(value)


AVAILABILITY_ASSET: Final = DailyAsset(
    AVAILABILITY_STAGE,
    _availability_sources,
    {
        "seconds_add_up": (
            "Up, silent, retired and blind seconds add up to the time of the day since the node was first seen.",
            availability_queries.wrong_sums,
        ),
        "no_node_missing": ("Every node that was known on the day has a row.", availability_queries.missing_nodes),
    },
    _availability_metadata,
    {
        **{column: (("node_availability", column),) for column in ("name", "stream", "node")},
        **dict.fromkeys(
            ("up_seconds", "timeout_seconds", "retired_seconds", "outages", "longest_outage_seconds"),
            (("node_availability", "first_seen"), ("node_advisories", "event"), ("node_advisories", "event_time")),
        ),
        "transitions": (("node_advisories", "transition"),),
    },
)
INVENTORY_ASSET: Final = DailyAsset(
    INVENTORY_STAGE,
    lambda settings: [
        table_key(settings, table) for table in ("node_snapshots", "node_availability", "node_advisories")
    ],
    {
        "values_add_up": (
            "The nodes of a property's values add up to the nodes of the day.",
            inventory_queries.wrong_sums,
        ),
        "no_node_missing": (
            "Every node with a message that was copied on the day is counted.",
            inventory_queries.missing_nodes,
        ),
    },
    _inventory_metadata,
    {
        **{column: (("node_snapshots", column),) for column in ("name", "stream")},
        **dict.fromkeys(("property", "value"), (("node_snapshots", "payload"),)),
        **dict.fromkeys(("nodes", "came", "went"), (("node_snapshots", "node"), ("node_snapshots", "payload"))),
        "all_nodes": (("node_availability", "node"), ("node_availability", "status")),
    },
)
