"""The asset `["fleet", "availability_daily"]`: how long each node was up, by day, computed by Spark.

Here: its partitions, its checks, what is recorded of it. Not here: the computation (`stages.availability`), when it runs
(`automation.availability`), its picture (`pictures`). No `from __future__ import annotations` here: Dagster reads the
annotations of an asset's function.
"""

import time
import warnings
from collections.abc import Iterator
from datetime import date, timedelta
from typing import Any, Final

import dagster as dg

from sr_assets.adapters.published import availability_queries
from sr_assets.assets.fleet import table_key
from sr_assets.assets.streams import OWNERS
from sr_assets.domain.days import Day, day_of
from sr_assets.domain.errors import SrAssetsError
from sr_assets.settings import Settings
from sr_assets.stages.availability import compute_days, first_date

KEY: Final = table_key("availability_daily")
#: As many days are in the picture, and in the table of the worst nodes.
_SHOWN_DAYS: Final = 30
_WORST: Final = 10
_CHECKS: Final = {
    "seconds_add_up": "Up, silent, retired and blind seconds add up to the time of the day since the node was first seen.",
    "no_node_missing": "Every node that was known on the day has a row.",
}


def daily_partitions(settings: Settings) -> dg.DailyPartitionsDefinition:
    """Return the days of the table, today's included; the first is the earliest that is there or can be computed."""
    first = first_date(settings, time.time_ns())
    return dg.DailyPartitionsDefinition(
        start_date=first.isoformat(), timezone=settings.availability_timezone, end_offset=1
    )


def build_availability_asset(settings: Settings) -> dg.AssetsDefinition:
    """Return the table's asset; needs the resources `platform` and `spark`. A run takes any number of consecutive days."""
    sources = ["node_availability", "node_advisories", *(["global_advisories"] if settings.feeds else [])]

    def availability_daily(
        context: dg.AssetExecutionContext,
    ) -> Iterator[dg.MaterializeResult[None] | dg.AssetCheckResult]:
        configured = context.resources.platform.settings
        dates = sorted(date.fromisoformat(key) for key in context.partition_keys)
        try:
            rows = compute_days(configured, dates, lambda: context.resources.spark.spark_session)
            metadata = _metadata(configured, rows)
            days = [day_of(when, configured.availability_timezone) for when in dates]
            verdicts = list(_verdicts(configured, days))
        except SrAssetsError as error:
            raise dg.Failure(str(error), allow_retries=False) from None
        yield dg.MaterializeResult(KEY, metadata=metadata)
        yield from verdicts

    with warnings.catch_warnings():
        # Dagster warns that backfill policies may still change; they are the way to compute many days at once.
        warnings.simplefilter("ignore", dg.BetaWarning)
        return dg.asset(
            key=KEY,
            deps=[table_key(table) for table in sources],
            partitions_def=daily_partitions(settings),
            backfill_policy=dg.BackfillPolicy.single_run(),
            check_specs=[dg.AssetCheckSpec(name, asset=KEY, description=text) for name, text in _CHECKS.items()],
            description="Table availability_daily of fleet.duckdb: one row per node and day on which it was known.",
            group_name="fleet",
            kinds={"duckdb", "spark"},
            owners=OWNERS,
            required_resource_keys={"platform", "spark"},
        )(availability_daily)


def _metadata(settings: Settings, rows: dict[date, int]) -> dict[str, Any]:
    """Return the number of rows, the picture of the last days, and the worst nodes of them."""
    from sr_assets.assets.pictures import daily_chart

    since = max(rows) - timedelta(days=_SHOWN_DAYS - 1)
    days = availability_queries.availability(settings.home, by="day", since=since)
    worst = availability_queries.availability(settings.home, by="node", since=since, most=_WORST)
    return {
        "dagster/row_count": sum(rows.values()),
        "days": len(rows),
        "availability": dg.MetadataValue.md(daily_chart(days)),
        "worst_nodes": dg.MetadataValue.table(
            [
                dg.TableRecord({name: _cell(value) for name, value in zip(worst.columns, row, strict=True)})
                for row in worst.values
            ],
            schema=dg.TableSchema([dg.TableColumn(name) for name in worst.columns]),
        ),
    }


def _cell(value: Any) -> str | float | int | bool | None:
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _verdicts(settings: Settings, days: list[Day]) -> Iterator[dg.AssetCheckResult]:
    counts = {
        "seconds_add_up": sum(availability_queries.wrong_sums(settings.home, day) for day in days),
        "no_node_missing": sum(availability_queries.missing_nodes(settings.home, day) for day in days),
    }
    for name, count in counts.items():
        yield dg.AssetCheckResult(asset_key=KEY, check_name=name, passed=count == 0, metadata={"nodes": count})
