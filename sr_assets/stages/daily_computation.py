"""Computation of the daily tables `availability_daily` and `inventory_daily`, in the run's process or in Spark."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa

from sr_assets.adapters.published.daily_rows import AvailabilityRows, DailyRows, InventoryRows
from sr_assets.adapters.published.daily_tables import DailyTable
from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.adapters.published.node_histories import Histories, read_spans, read_streams, with_tables
from sr_assets.adapters.state.operator_settings import added_windows
from sr_assets.domain.days import Day, date_at, day_of
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.settings import DailySettings, Settings

if TYPE_CHECKING:
    import duckdb

    from sr_assets.adapters.spark.run_session import SparkConnection
    from sr_assets.settings import StreamSettings

logger = logging.getLogger(__name__)
#: Maximum number of nodes' days before their rows are written; more days are computed in portions.
_HELD_ROWS: Final = 3_000_000
#: DuckDB's memory; it spills the rest into `fleet.duckdb.tmp` in the home. The inventory of 1,000,000 nodes thus took 1.0 GB
#: instead of 2.0, and a quarter more CPU; the availability of 10,000,000 nodes takes less than 2 GB.
_MEMORY: Final = "768MiB"


class Computed(NamedTuple):
    """The number of rows of each computed date, and whether Spark computed them."""

    rows: dict[date, int]
    in_spark: bool


class DailyStage(ABC):
    """The computation of one daily table by `computation`. `own`: exclude nodes that other sites report."""

    computation: type[DailyRows]
    own: bool

    @property
    def table(self) -> DailyTable:
        """The computed table."""
        return self.computation.table

    @abstractmethod
    def settings(self, settings: Settings) -> DailySettings:
        """Return the table's time zone and retention."""

    @abstractmethod
    def input_retention(self, settings: Settings) -> tuple[int, str]:
        """Return the retention of the input in ns, and its configuration key."""

    @abstractmethod
    def rows_of(
        self, settings: Settings, connection: duckdb.DuckDBPyConnection, streams: pa.Table, days: Sequence[Day]
    ) -> DailyRows:
        """Return the computation of consecutive days from the opened published tables; the first `days_before` have no rows."""

    def first_date(self, settings: Settings, now_ns: int) -> date:
        """Return the earliest computable date of the table; the input of earlier dates has expired."""
        return min((self.earliest_input(settings, now_ns), *self.table.computed_dates(settings.home)[:1]))

    def compute_days(self, settings: Settings, dates: Sequence[date], spark: SparkConnection) -> Computed:
        """Compute the rows of consecutive dates from the published tables, replacing existing rows.

        The input of the first dates may have expired: they keep their rows, and are not in the result. `spark` is opened only if
        it computes the rows. Raises RunError if no table was published yet or the rows cannot be written, and ConfigurationError
        if no date can be computed.
        """
        chosen, before = self.settings(settings), self.computation.days_before
        with open_fleet(settings.home) as connection:
            streams = read_streams(connection, settings.replicator, own=self.own)
            watermark_ns = self._watermark_ns(streams)
            dates = self._computable(settings, dates, watermark_ns)
            days = [day_of(dates[0] - timedelta(days=number), chosen.timezone) for number in range(before, 0, -1)]
            days += [day_of(when, chosen.timezone) for when in dates]
            rows = self.rows_of(settings, connection, streams, days)
            in_spark = _is_for_spark(settings.home, connection, self.table, spark)
            compute = partial(_compute_in_spark, spark) if in_spark else _compute_here
            written = compute(settings, connection, rows)
        logger.info("%s of %s to %s: %d rows", self.table.computed, dates[0], dates[-1], sum(written.values()))
        self.table.forget_before(settings.home, date_at(watermark_ns - chosen.retention_ns, chosen.timezone))
        return Computed(written, in_spark)

    def require_input(self, settings: Settings) -> None:
        """Raise RunError if no tracked stream has been published yet, so that there is nothing to compute."""
        with open_fleet(settings.home) as connection:
            self._watermark_ns(read_streams(connection, settings.replicator, own=self.own))

    def _watermark_ns(self, streams: pa.Table) -> int:
        """Return the latest watermark of a stream of this installation or of a feed."""
        clocks: list[int] = streams["clock_ns"].drop_null().to_pylist()
        if not clocks:
            raise RunError(f"{self.table.computed}: no tracked stream has been published yet; run it once first")
        return max(clocks)

    def earliest_input(self, settings: Settings, now_ns: int) -> date:
        """Return the earliest date whose input has not expired."""
        return self._earliest(settings, now_ns - self.input_retention(settings)[0])

    def _earliest(self, settings: Settings, begins_ns: int) -> date:
        return date_at(begins_ns, self.settings(settings).timezone) + timedelta(days=1 + self.computation.days_before)

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

    computation = AvailabilityRows
    own = False

    def settings(self, settings: Settings) -> DailySettings:
        return settings.availability

    def input_retention(self, settings: Settings) -> tuple[int, str]:
        """Return the retention of transitions."""
        return settings.advisories.retention_ns, "advisories.retention"

    def rows_of(
        self, settings: Settings, connection: duckdb.DuckDBPyConnection, streams: pa.Table, days: Sequence[Day]
    ) -> DailyRows:
        """Return the computation of a row for each node and day on which the node was known."""
        windows = {}
        for number, stream in _own_streams(settings, streams):
            named = (*stream.windows, *added_windows(settings.home / "sites" / stream.name))
            windows[number] = [(each, tuple(each.spans(days[0].first_ns, days[-1].next_ns))) for each in named]
        spans = read_spans(connection, streams, days[0].first_ns)
        return AvailabilityRows(streams, days, spans, {number: named for number, named in windows.items() if named})


class InventoryStage(DailyStage):
    """Number of nodes per value of each property; a day is compared with the previous day."""

    computation = InventoryRows
    own = True

    def settings(self, settings: Settings) -> DailySettings:
        return settings.inventory

    def input_retention(self, settings: Settings) -> tuple[int, str]:
        """Return the shorter retention of messages and transitions."""
        return min(
            (settings.advisories.retention_ns, "advisories.retention"),
            (settings.snapshots.retention_ns, "snapshots.retention"),
        )

    def rows_of(
        self, settings: Settings, connection: duckdb.DuckDBPyConnection, streams: pa.Table, days: Sequence[Day]
    ) -> DailyRows:
        """Return the computation of a row for each value that a node had on the day or the previous day."""
        # A reporting node is copied within two intervals: one, plus the shorter time until it reports again.
        held_us = {
            number: 2
            * (stream.node_classes.longest_interval_ns if stream.node_classes else stream.policy.interval_ns)
            // 1000
            for number, stream in _own_streams(settings, streams)
            if stream.policy
        }
        held = pa.table({"number": pa.array(held_us, pa.int32()), "held_us": pa.array(held_us.values(), pa.int64())})
        with with_tables(connection, streams=streams, held=held):
            progress = connection.sql(
                f"""
                SELECT number, coalesce(held_us, 0) AS held_us, epoch_ns(known_until) AS known_ns
                FROM streams LEFT JOIN held USING (number) LEFT JOIN ({self.table.clocks}) USING (name, stream)
                """
            ).to_arrow_table()
        return InventoryRows(streams, days, progress, settings.inventory.facts)


def _own_streams(settings: Settings, streams: pa.Table) -> Iterator[tuple[int, StreamSettings]]:
    """Yield the number and the configuration of each published stream of this installation."""
    configured = {(stream.name, stream.stream): stream for stream in settings.streams}
    for row in streams.to_pylist():
        if row["own"] and (stream := configured.get((row["name"], row["stream"]))):
            yield row["number"], stream


def _is_for_spark(home: Path, connection: duckdb.DuckDBPyConnection, table: DailyTable, spark: SparkConnection) -> bool:
    """Return whether Spark computes a table, because it was chosen and its executors have the files of the home."""
    query = "SELECT (SELECT count(*) FROM node_availability) + (SELECT count(*) FROM global_availability)"
    ((nodes,),) = connection.execute(query).fetchall()
    if not spark.takes_nodes(nodes, table.computed):
        return False
    if spark.remote:
        from sr_assets.adapters.spark.daily_jobs import lacks_home

        cores = spark.cores()
        with spark.use() as session:
            if lacking := lacks_home(session, home.resolve(), cores):
                logger.warning(
                    "%s in the run's process: the executors cannot use the files of the home (%s); for Spark, mount %s there"
                    " for the same user, and install duckdb",
                    *(table.computed, lacking, home.resolve()),
                )
                return False
    return True


def _compute_in_spark(
    spark: SparkConnection, settings: Settings, connection: duckdb.DuckDBPyConnection, rows: DailyRows
) -> dict[date, int]:
    """Let Spark write the rows of all days; return the number of rows per day."""
    # It imports Spark.
    from sr_assets.adapters.spark.daily_jobs import draft_folder, write_in_spark

    home, dates = settings.home.resolve(), [day.date for day in rows.days[rows.days_before :]]
    with draft_folder(home, rows.table) as draft:
        with spark.use() as session:
            files = write_in_spark(session, connection, home, rows, draft)
        return rows.table.move_days(connection, home, files, dates, settings.published_mode)


def _compute_here(settings: Settings, connection: duckdb.DuckDBPyConnection, rows: DailyRows) -> dict[date, int]:
    """Write the rows of all days, in portions of days; return the number of rows per day."""
    connection.execute(f"SET memory_limit = '{_MEMORY}'")
    histories, before = Histories(connection, rows.streams), rows.days_before
    portion, written = max(1, _HELD_ROWS // max(1, histories.node_count())), dict[date, int]()
    for first in range(before, len(rows.days), portion):
        days = rows.days[first - before : first + portion]
        query = rows.total.format(rows=f"({rows.compute(histories, days)})")
        dates = [day.date for day in days[before:]]
        written |= rows.table.write_days(connection, settings.home, query, dates, settings.published_mode)
    return written


AVAILABILITY_STAGE: Final = AvailabilityStage()
INVENTORY_STAGE: Final = InventoryStage()
