"""The inventory of nodes by day: what is counted of their messages.

Not here: which properties a message has (`adapters.published.inventory`), the counting (`adapters.spark.inventory`), its table
(`adapters.published.daily`), what it has in common with other daily tables (`stages.daily`).
"""

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

#: What a node has on a day weighs as much as so many rows.
_ROWS: Final = 4


class InventoryStage(DailyStage):
    """On how many nodes each value of each property was; the day before is what a day is compared with."""

    table = INVENTORY
    own = True
    days_before = 1

    def settings(self, settings: Settings) -> DailySettings:
        """Return the block `inventory`."""
        return settings.inventory

    def kept(self, settings: Settings) -> tuple[int, str]:
        """Return how long messages and transitions are both kept."""
        return min(
            (settings.advisories_retention_ns, "advisories.retention"),
            (settings.snapshots_retention_ns, "snapshots.retention"),
        )

    def compute_portion(
        self,
        settings: Settings,
        published: Histories,
        days: Sequence[Day],
        session: Callable[[], SparkSession],
        job_rows: int,
    ) -> dict[date, int]:
        """Write a row for each value that a node had on the day or the day before it."""
        from sr_assets.adapters.spark.inventory import count_values

        # A node that reports is copied within two intervals: one and the time until it reports again, which is shorter.
        held_ns = {
            (stream.name, stream.stream): 2 * stream.policy.interval_ns for stream in settings.streams if stream.policy
        }
        unknown = observe(published, days, settings.inventory_facts, held_ns)
        with spark_errors():
            parts = [
                count_values(session(), observed(published, part.nodes), days, unknown)
                for part in published.histories(days, max(1, job_rows // _ROWS))
            ]
        return write_inventory(published, days[1:], pa.concat_tables(parts), settings.published_mode)


INVENTORY_STAGE: Final = InventoryStage()
