"""The common part of the daily tables: the computable days, and their computation in portions that fit into memory."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from sr_assets.adapters.published.node_histories import Histories
from sr_assets.domain.days import date_at, day_of
from sr_assets.domain.errors import ConfigurationError, RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import date

    from pyspark.sql import SparkSession

    from sr_assets.adapters.published.daily import DailyTable
    from sr_assets.domain.days import Day
    from sr_assets.settings import DailySettings, Settings

logger = logging.getLogger(__name__)

#: Maximum number of rows in memory before they are written; more days are computed in portions.
_HELD_ROWS: Final = 3_000_000
#: Approximate rows per Spark job, including its results: the local engine has a small heap.
_JOB_ROWS: Final = 400_000


@contextlib.contextmanager
def spark_errors() -> Iterator[None]:
    """Translate Spark's exceptions into one-line errors of this package."""
    from sr_assets.adapters.spark.session import spark_error

    try:
        yield
    except Exception as error:
        raise spark_error(error) from error


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
        self,
        settings: Settings,
        published: Histories,
        days: Sequence[Day],
        session: Callable[[], SparkSession],
        job_rows: int,
    ) -> dict[date, int]:
        """Write the rows of consecutive days, of which the first `days_before` are only read; return the number of rows
        per day.

        Each Spark job handles about `job_rows` rows.
        """

    def first_date(self, settings: Settings, now_ns: int) -> date:
        """Return the earliest computable date of the table; the input of earlier dates has expired."""
        earliest = self._earliest(settings, now_ns - self.input_retention(settings)[0])
        return min((earliest, *self.table.computed_dates(settings.home)[:1]))

    def compute_days(
        self, settings: Settings, dates: Sequence[date], session: Callable[[], SparkSession]
    ) -> dict[date, int]:
        """Compute the rows of consecutive dates from the published tables, replacing existing rows; return the number
        per date.

        `session` is called only if there is work. Raises RunError if no table was published yet or the rows cannot be
        written, and ConfigurationError if the input of a date has expired.
        """
        chosen, before = self.settings(settings), self.days_before
        days = [day_of(dates[0] - timedelta(days=number), chosen.timezone) for number in range(before, 0, -1)]
        days += [day_of(when, chosen.timezone) for when in dates]
        rows: dict[date, int] = {}
        with Histories(settings.home, settings.replicator, own=self.own).opened() as published:
            watermark_ns = published.watermark_ns()
            if watermark_ns is None:
                raise RunError(f"{self.table.computed}: no tracked stream has been published yet; run it once first")
            self._refuse_forgotten(settings, dates[0], days[0].first_ns, watermark_ns)
            portion = max(1, _HELD_ROWS // max(1, published.node_count()))
            for first in range(before, len(days), portion):
                some = days[first - before : first + portion]
                written = self.compute_portion(settings, published, some, session, _JOB_ROWS)
                logger.info(
                    "%s of %s to %s: %d rows",
                    self.table.computed,
                    some[before].date,
                    some[-1].date,
                    sum(written.values()),
                )
                rows |= written
        self.table.forget_before(settings.home, date_at(watermark_ns - chosen.retention_ns, chosen.timezone))
        return rows

    def _earliest(self, settings: Settings, begins_ns: int) -> date:
        return date_at(begins_ns, self.settings(settings).timezone) + timedelta(days=1 + self.days_before)

    def _refuse_forgotten(self, settings: Settings, first: date, first_ns: int, watermark_ns: int) -> None:
        input_retention_ns, key = self.input_retention(settings)
        if first_ns < watermark_ns - input_retention_ns:
            raise ConfigurationError(
                f"{self.table.computed} of {first}: its input has expired ({key}); the earliest day that"
                f" can be computed is {self._earliest(settings, watermark_ns - input_retention_ns)}"
            )
