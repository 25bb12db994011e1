"""The rows of the table `availability_daily`, of what Spark computed.

Not here: the table (`daily`), what its rows are computed of (`node_histories`), the computation (`spark.availability`), what is
asked of the table (`availability_queries`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sr_assets.adapters.published.daily import AVAILABILITY

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import date

    import pyarrow as pa

    from sr_assets.adapters.published.node_histories import Histories
    from sr_assets.domain.days import Day


def write_availability(histories: Histories, days: Sequence[Day], measured: pa.Table, mode: int) -> dict[date, int]:
    """Replace the rows of some days, in files of permissions `mode`; returns how many rows each has.

    `measured` has a row for each node and day on which it was known: day (an index into `days`), key, and in ns up_ns,
    timeout_ns, retired_ns, blind_ns and longest_ns, with transitions and outages. Raises RunError when they cannot be written.
    """
    queries = {
        day.date: f"""
            SELECT DATE '{day.date}', replicator, name, stream, node, up_ns / 1e9, timeout_ns / 1e9, retired_ns / 1e9,
                blind_ns / 1e9, transitions, outages, longest_ns / 1e9, until_ns >= {day.next_ns}
            FROM measured JOIN known USING (key) JOIN streams USING (number) WHERE day = {number}
            ORDER BY key
            """
        for number, day in enumerate(days)
    }
    with histories.beside(measured=measured) as connection:
        return AVAILABILITY.write_days(connection, histories.home, queries, mode)
