"""Computation of `availability_daily` from the published transitions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

from sr_assets.adapters.published.availability import write_availability
from sr_assets.adapters.published.daily import AVAILABILITY
from sr_assets.stages.daily import DailyStage, spark_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import date

    from pyspark.sql import SparkSession

    from sr_assets.adapters.published.node_histories import Histories
    from sr_assets.domain.days import Day
    from sr_assets.settings import DailySettings, Settings


class AvailabilityStage(DailyStage):
    """Seconds up, silent and retired of each node and day, for local sites and for the sites of the feeds."""

    table = AVAILABILITY
    own = False
    days_before = 0

    def settings(self, settings: Settings) -> DailySettings:
        """Return the block `availability`."""
        return settings.availability

    def input_retention(self, settings: Settings) -> tuple[int, str]:
        """Return the retention of transitions."""
        return settings.advisories.retention_ns, "advisories.retention"

    def compute_portion(
        self,
        settings: Settings,
        published: Histories,
        days: Sequence[Day],
        session: Callable[[], SparkSession],
        job_rows: int,
    ) -> dict[date, int]:
        """Write a row for each node and day on which the node was known."""
        from sr_assets.adapters.spark.availability import measure_days

        with spark_errors():
            parts = [measure_days(session(), part, days) for part in published.histories(days, job_rows)]
        return write_availability(published, days, pa.concat_tables(parts), settings.published_mode)


AVAILABILITY_STAGE: Final = AvailabilityStage()
