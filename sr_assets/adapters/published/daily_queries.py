"""What is asked of every daily table: which days are not final.

Not here: the tables (`daily`), what is asked of one of them (`availability_queries`, `inventory_queries`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sr_assets.adapters.published.queries import ask

if TYPE_CHECKING:
    from datetime import date
    from pathlib import Path

    from sr_assets.adapters.published.daily import DailyTable
    from sr_assets.domain.days import Day


def unfinished_dates(home: Path, table: DailyTable) -> list[tuple[date, int]]:
    """Return the dates with rows of a day that was not over, each with until when (unix ns) their streams are known now."""
    sql = f"""
        WITH rest AS (SELECT DISTINCT date, name, stream FROM {table.name} WHERE NOT final), clocks AS ({table.clocks})
        SELECT date, max(epoch_ns(known_until)) FROM rest JOIN clocks
            ON clocks.name IS NOT DISTINCT FROM rest.name AND clocks.stream IS NOT DISTINCT FROM rest.stream
        GROUP BY date HAVING max(known_until) IS NOT NULL ORDER BY date
        """
    return [(when, until_ns) for when, until_ns in ask(home, sql).values]


def bounds(day: Day) -> dict[str, object]:
    """Return a day's parameters of a query: date, first_us, next_us."""
    return {"date": day.date, "first_us": day.first_ns // 1000, "next_us": day.next_ns // 1000}
