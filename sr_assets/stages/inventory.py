"""Computation of `inventory_daily` from the copied messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

from sr_assets.adapters.published.daily import INVENTORY
from sr_assets.adapters.published.inventory import observe, observed, write_inventory
from sr_assets.stages.daily import DailyStage, spark_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import date

    from pyspark.sql import SparkSession

    from sr_assets.adapters.published.node_histories import Histories
    from sr_assets.domain.days import Day
    from sr_assets.settings import DailySettings, Settings

#: Approximate number of table rows that one node's properties on a day correspond to.
_ROWS: Final = 4


class InventoryStage(DailyStage):
    """Number of nodes per value of each property; a day is compared with the previous day."""

    table = INVENTORY
    own = True
    days_before = 1

    def settings(self, settings: Settings) -> DailySettings:
        """Return the block `inventory`."""
        return settings.inventory

    def input_retention(self, settings: Settings) -> tuple[int, str]:
        """Return the shorter retention of messages and transitions."""
        return min(
            (settings.advisories.retention_ns, "advisories.retention"),
            (settings.snapshots.retention_ns, "snapshots.retention"),
        )

    def compute_portion(
        self,
        settings: Settings,
        published: Histories,
        days: Sequence[Day],
        session: Callable[[], SparkSession],
        job_rows: int,
    ) -> dict[date, int]:
        """Write a row for each value that a node had on the day or the previous day."""
        from sr_assets.adapters.spark.inventory import count_values

        # A reporting node is copied within two intervals: one, plus the shorter time until it reports again.
        held_ns = {
            (stream.name, stream.stream): 2 * stream.policy.interval_ns for stream in settings.streams if stream.policy
        }
        unknown = observe(published, days, settings.inventory.facts, held_ns)
        with spark_errors():
            parts = [
                count_values(session(), observed(published, part.nodes), days, unknown)
                for part in published.histories(days, max(1, job_rows // _ROWS))
            ]
        return write_inventory(published, days[1:], pa.concat_tables(parts), settings.published_mode)


INVENTORY_STAGE: Final = InventoryStage()
