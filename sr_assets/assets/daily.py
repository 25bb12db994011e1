"""The daily tables as assets: a partition for each day, computed by Spark, any number of consecutive days in a run.

Here: what they have in common. Not here: what each one records and checks (`availability`, `inventory`), the computation
(`stages.daily`), when it runs (`automation.daily`). No `from __future__ import annotations` here: Dagster reads the annotations
of an asset's function.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import dagster as dg

from sr_assets.adapters.published.reading import Rows
from sr_assets.assets.described import documented, table_metadata
from sr_assets.assets.fleet import table_key
from sr_assets.assets.streams import OWNERS
from sr_assets.domain.days import Day, day_of
from sr_assets.domain.errors import SrAssetsError
from sr_assets.settings import Settings
from sr_assets.stages.daily import DailyStage

#: As many days are in an asset's picture.
SHOWN_DAYS = 30


@dataclass(frozen=True)
class DailyCheck:
    """A check of a table's days: what it says, and how many rows of a day are wrong."""

    description: str
    wrong: Callable[[Path, Day], int]


@dataclass(frozen=True)
class DailyAsset:
    """The asset of a daily table.

    `row` says what one row is of, `sources` which assets it is computed of; `metadata` returns what is recorded of a run that
    computed days, of which the last is given.
    """

    stage: DailyStage
    row: str
    sources: Callable[[Settings], list[dg.AssetKey]]
    checks: Mapping[str, DailyCheck]
    metadata: Callable[[Settings, date], dict[str, Any]]

    @property
    def key(self) -> dg.AssetKey:
        """The table's key."""
        return table_key(self.stage.table.name)


def daily_partitions(settings: Settings, stage: DailyStage) -> dg.DailyPartitionsDefinition:
    """Return the days of a table, today's included; the first is the earliest that is there or can be computed."""
    first = stage.first_date(settings, time.time_ns())
    return dg.DailyPartitionsDefinition(
        start_date=first.isoformat(), timezone=stage.settings(settings).timezone, end_offset=1
    )


def build_daily_asset(settings: Settings, daily: DailyAsset) -> dg.AssetsDefinition:
    """Return a table's asset; needs the resources `platform` and `spark`. A run takes any number of consecutive days."""
    stage = daily.stage

    def compute(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None] | dg.AssetCheckResult]:
        configured: Settings = context.resources.platform.settings
        dates = sorted(date.fromisoformat(key) for key in context.partition_keys)
        try:
            rows = stage.compute_days(configured, dates, lambda: context.resources.spark.spark_session)
            metadata = {
                **table_metadata(stage.table.kinds, sum(rows.values())),
                "days": len(rows),
                **daily.metadata(configured, dates[-1]),
            }
            days = [day_of(when, stage.settings(configured).timezone) for when in dates]
            verdicts = list(_verdicts(daily, configured.home, days))
        except SrAssetsError as error:
            raise dg.Failure(str(error), allow_retries=False) from None
        yield dg.MaterializeResult(daily.key, metadata=metadata)
        yield from verdicts

    with warnings.catch_warnings():
        # Dagster warns that backfill policies may still change; they are the way to compute many days at once.
        warnings.simplefilter("ignore", dg.BetaWarning)
        return dg.asset(
            key=daily.key,
            deps=daily.sources(settings),
            partitions_def=daily_partitions(settings, stage),
            backfill_policy=dg.BackfillPolicy.single_run(),
            check_specs=[
                dg.AssetCheckSpec(name, asset=daily.key, description=check.description)
                for name, check in daily.checks.items()
            ],
            description=documented(
                f"Table {stage.table.name} of fleet.duckdb: one row per {daily.row}.",
                f"rules.md#{stage.table.computed}-by-day",
            ),
            group_name="fleet",
            kinds={"duckdb", "spark"},
            owners=OWNERS,
            required_resource_keys={"platform", "spark"},
        )(compute)


def shown_table(rows: Rows) -> dg.TableMetadataValue:
    """Return rows as a table on an asset's page."""
    return dg.MetadataValue.table(
        [
            dg.TableRecord({name: _cell(value) for name, value in zip(rows.columns, row, strict=True)})
            for row in rows.values
        ],
        schema=dg.TableSchema([dg.TableColumn(name) for name in rows.columns]),
    )


def _cell(value: Any) -> str | float | int | bool | None:
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _verdicts(daily: DailyAsset, home: Path, days: list[Day]) -> Iterator[dg.AssetCheckResult]:
    for name, check in daily.checks.items():
        count = sum(check.wrong(home, day) for day in days)
        yield dg.AssetCheckResult(asset_key=daily.key, check_name=name, passed=count == 0, metadata={"wrong": count})
