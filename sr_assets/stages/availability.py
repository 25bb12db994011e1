"""The availability of nodes by day: which days can be computed, and computing them.

Not here: the computation (`adapters.spark.availability`), its tables (`adapters.published.availability`), when it is done
(`automation.availability`).
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from sr_assets.adapters.published.availability import computed_dates, forget_before
from sr_assets.adapters.published.availability_history import Days
from sr_assets.domain.days import date_at, day_of
from sr_assets.domain.errors import ConfigurationError, RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import date

    from pyspark.sql import SparkSession

    from sr_assets.settings import Settings

logger = logging.getLogger(__name__)

#: The most rows that are held at once before they are written; more days are computed one portion after the other.
_HELD_ROWS: Final = 3_000_000
#: About as many rows go into one Spark job, its results included: an engine of ours has a small heap.
_JOB_ROWS: Final = 400_000


def first_date(settings: Settings, now_ns: int) -> date:
    """Return the earliest date that is, or can be, in the table: transitions before it are no longer kept."""
    earliest = date_at(now_ns - settings.advisories_retention_ns, settings.availability_timezone) + timedelta(days=1)
    return min((earliest, *computed_dates(settings.home)[:1]))


def compute_days(settings: Settings, dates: Sequence[date], session: Callable[[], SparkSession]) -> dict[date, int]:
    """Compute the rows of consecutive dates from the published tables; returns how many rows each has.

    Rows that were there are replaced. `session` is called when there is something to compute. Raises RunError when nothing was
    published yet, or the rows cannot be written; ConfigurationError when transitions of a date are no longer kept.
    """
    from sr_assets.adapters.spark.availability import measure_days
    from sr_assets.adapters.spark.session import spark_error

    days = [day_of(when, settings.availability_timezone) for when in dates]
    rows: dict[date, int] = {}
    with Days(settings.home, settings.replicator).opened() as published:
        watermark_ns = published.watermark_ns()
        if watermark_ns is None:
            raise RunError("availability: no tracked stream has been published yet; run it once first")
        _refuse_forgotten(settings, dates[0], days[0].first_ns, watermark_ns)
        portion = max(1, _HELD_ROWS // max(1, published.node_count()))
        for first in range(0, len(days), portion):
            some = days[first : first + portion]
            try:
                parts = [measure_days(session(), part, some) for part in published.histories(some, _JOB_ROWS)]
            except Exception as error:
                raise spark_error(error) from error
            measured = pa.concat_tables(parts)
            rows |= published.write(some, measured, settings.published_mode)
            logger.info("availability of %s to %s computed: %d rows", some[0].date, some[-1].date, measured.num_rows)
    kept_ns = watermark_ns - settings.availability_retention_ns
    forget_before(settings.home, date_at(kept_ns, settings.availability_timezone))
    return rows


def _refuse_forgotten(settings: Settings, first: date, first_ns: int, watermark_ns: int) -> None:
    begins_ns = watermark_ns - settings.advisories_retention_ns
    if first_ns < begins_ns:
        earliest = date_at(begins_ns, settings.availability_timezone) + timedelta(days=1)
        raise ConfigurationError(
            f"availability of {first}: its transitions are no longer kept (advisories.retention); the earliest day that can"
            f" be computed is {earliest}"
        )
