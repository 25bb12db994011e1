"""Computation of the daily tables `availability_daily` and `inventory_daily`, in portions of days that fit into memory."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import date, timedelta
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from sr_assets.adapters.published.availability import write_availability
from sr_assets.adapters.published.daily_tables import AVAILABILITY, INVENTORY, DailyTable
from sr_assets.adapters.published.inventory import observe, observed, write_inventory
from sr_assets.adapters.published.node_histories import Histories, History
from sr_assets.adapters.state.operator_settings import added_windows
from sr_assets.domain.days import Day, date_at, day_of
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.domain.tracking.maintenance import Window, covered
from sr_assets.settings import DailySettings, Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sr_assets.adapters.spark.run_session import SparkConnection

_NODES = pa.schema([("key", pa.int32()), ("windows", pa.int32())])
_SPANS = pa.schema([("windows", pa.int32()), ("from_ns", pa.int64()), ("to_ns", pa.int64())])
logger = logging.getLogger(__name__)
#: Maximum number of rows in memory before they are written; more days are computed in portions.
_HELD_ROWS: Final = 3_000_000
#: Approximate rows per Spark job, including its results: the local engine has a small heap.
_JOB_ROWS: Final = 400_000
#: Approximate number of table rows that one node's properties on a day correspond to.
_PROPERTY_ROWS: Final = 4


def maintained_time(settings: Settings, histories: Histories, days: Sequence[Day]) -> tuple[pa.Table, pa.Table]:
    """Return the nodes that windows are about, and the disjoint covered times of consecutive days, both by `windows`.

    `windows` numbers the combinations of windows. Columns: key, windows; and windows, from_ns, to_ns.
    """
    numbers: dict[tuple[Window, ...], int] = {}
    rows = []
    for stream in settings.streams:
        windows = (*stream.windows, *added_windows(settings.home / "sites" / stream.name))
        for key, node, node_class in histories.nodes_of(stream.name, stream.stream) if windows else ():
            matching = tuple(window for window in windows if window.matches(node, node_class))
            if matching:
                rows.append({"key": key, "windows": numbers.setdefault(matching, len(numbers))})
    spans = [
        {"windows": number, "from_ns": since_ns, "to_ns": until_ns}
        for windows, number in numbers.items()
        for since_ns, until_ns in covered(windows, days[0].first_ns, days[-1].next_ns)
    ]
    return pa.Table.from_pylist(rows, _NODES), pa.Table.from_pylist(spans, _SPANS)


def _session(spark: SparkConnection, part: History) -> AbstractContextManager[SparkSession | None]:
    """Return the session for a part of the nodes; None: so few nodes need no Spark."""
    return spark.use() if spark.takes_nodes(part.nodes.num_rows) else nullcontext()


class DailyStage(ABC):
    """The computation of one daily table.

    `own`: exclude nodes that other sites report. `days_before`: number of earlier days to read as well.
    """

    table: DailyTable
    own: bool
    days_before: int

    @abstractmethod
    def settings(self, settings: Settings) -> DailySettings:
        """Return the table's time zone and retention."""

    @abstractmethod
    def input_retention(self, settings: Settings) -> tuple[int, str]:
        """Return the retention of the input in ns, and its configuration key."""

    @abstractmethod
    def compute_portion(
        self, settings: Settings, published: Histories, days: Sequence[Day], spark: SparkConnection
    ) -> dict[date, int]:
        """Write the rows of consecutive days after the first `days_before`; return the number of rows per day."""

    def first_date(self, settings: Settings, now_ns: int) -> date:
        """Return the earliest computable date of the table; the input of earlier dates has expired."""
        return min((self.earliest_input(settings, now_ns), *self.table.computed_dates(settings.home)[:1]))

    def compute_days(self, settings: Settings, dates: Sequence[date], spark: SparkConnection) -> dict[date, int]:
        """Compute the rows of consecutive dates from the published tables, replacing existing rows; return the number
        per computed date.

        The input of the first dates may have expired: they keep their rows. `spark` is opened only for many nodes.
        Raises RunError if no table was published yet or the rows cannot be written, and ConfigurationError if no date can
        be computed.
        """
        chosen, before = self.settings(settings), self.days_before
        rows: dict[date, int] = {}
        with Histories(settings.home, settings.replicator, own=self.own).opened() as published:
            watermark_ns = self._watermark_ns(published)
            dates = self._computable(settings, dates, watermark_ns)
            days = [day_of(dates[0] - timedelta(days=number), chosen.timezone) for number in range(before, 0, -1)]
            days += [day_of(when, chosen.timezone) for when in dates]
            portion = max(1, _HELD_ROWS // max(1, published.node_count()))
            for first in range(before, len(days), portion):
                some = days[first - before : first + portion]
                written = self.compute_portion(settings, published, some, spark)
                span = (some[before].date, some[-1].date)
                logger.info("%s of %s to %s: %d rows", self.table.computed, *span, sum(written.values()))
                rows |= written
        self.table.forget_before(settings.home, date_at(watermark_ns - chosen.retention_ns, chosen.timezone))
        return rows

    def require_input(self, settings: Settings) -> None:
        """Raise RunError if no tracked stream has been published yet, so that there is nothing to compute."""
        with Histories(settings.home, settings.replicator, own=self.own).opened() as published:
            self._watermark_ns(published)

    def _watermark_ns(self, published: Histories) -> int:
        watermark_ns = published.watermark_ns()
        if watermark_ns is None:
            raise RunError(f"{self.table.computed}: no tracked stream has been published yet; run it once first")
        return watermark_ns

    def earliest_input(self, settings: Settings, now_ns: int) -> date:
        """Return the earliest date whose input has not expired."""
        return self._earliest(settings, now_ns - self.input_retention(settings)[0])

    def _earliest(self, settings: Settings, begins_ns: int) -> date:
        return date_at(begins_ns, self.settings(settings).timezone) + timedelta(days=1 + self.days_before)

    def _computable(self, settings: Settings, dates: Sequence[date], watermark_ns: int) -> Sequence[date]:
        """Return the dates whose input has not expired; raises ConfigurationError if there is none."""
        earliest, (_, key) = self.earliest_input(settings, watermark_ns), self.input_retention(settings)
        left = [when for when in dates if when >= earliest]
        expired = f"its input has expired ({key}); the earliest day that can be computed is {earliest}"
        if not left:
            raise ConfigurationError(f"{self.table.computed} of {dates[0]}: {expired}")
        if len(left) < len(dates):
            logger.warning("%s of %s: %s", self.table.computed, dates[0], expired)
        return left


class AvailabilityStage(DailyStage):
    """Seconds up, silent and retired of each node and day, for local sites and for the sites of the feeds."""

    table = AVAILABILITY
    own = False
    days_before = 0

    def settings(self, settings: Settings) -> DailySettings:
        return settings.availability

    def input_retention(self, settings: Settings) -> tuple[int, str]:
        """Return the retention of transitions."""
        return settings.advisories.retention_ns, "advisories.retention"

    def compute_portion(
        self, settings: Settings, published: Histories, days: Sequence[Day], spark: SparkConnection
    ) -> dict[date, int]:
        """Write a row for each node and day on which the node was known."""
        from sr_assets.adapters.spark.node_days import measure_days

        parts = []
        for part in published.histories(days, _JOB_ROWS):
            with _session(spark, part) as session:
                parts.append(measure_days(session, part, days))
        maintained = maintained_time(settings, published, days)
        return write_availability(published, days, pa.concat_tables(parts), maintained, settings.published_mode)


class InventoryStage(DailyStage):
    """Number of nodes per value of each property; a day is compared with the previous day."""

    table = INVENTORY
    own = True
    days_before = 1

    def settings(self, settings: Settings) -> DailySettings:
        return settings.inventory

    def input_retention(self, settings: Settings) -> tuple[int, str]:
        """Return the shorter retention of messages and transitions."""
        return min(
            (settings.advisories.retention_ns, "advisories.retention"),
            (settings.snapshots.retention_ns, "snapshots.retention"),
        )

    def compute_portion(
        self, settings: Settings, published: Histories, days: Sequence[Day], spark: SparkConnection
    ) -> dict[date, int]:
        """Write a row for each value that a node had on the day or the previous day."""
        from sr_assets.adapters.spark.node_days import count_values

        # A reporting node is copied within two intervals: one, plus the shorter time until it reports again.
        held_ns = {
            (stream.name, stream.stream): 2
            * (stream.node_classes.longest_interval_ns if stream.node_classes else stream.policy.interval_ns)
            for stream in settings.streams
            if stream.policy
        }
        unknown = observe(published, days, settings.inventory.facts, held_ns)
        parts = []
        for part in published.histories(days, max(1, _JOB_ROWS // _PROPERTY_ROWS)):
            nodes = observed(published, part.nodes)
            with _session(spark, part) as session:
                parts.append(count_values(session, nodes, days, unknown))
        return write_inventory(published, days[1:], pa.concat_tables(parts), settings.published_mode)


AVAILABILITY_STAGE: Final = AvailabilityStage()
INVENTORY_STAGE: Final = InventoryStage()
