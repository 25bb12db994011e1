"""The asset `["fleet", "availability_daily"]`: how long each node was up, by day.

Here: what is recorded of it, and its checks. Not here: what daily tables have in common (`daily`), the computation
(`stages.availability`), its picture (`pictures`).
"""

from __future__ import annotations

from datetime import date, timedelta
from typing import TYPE_CHECKING, Any, Final

import dagster as dg

from sr_assets.adapters.published import availability as availability_queries
from sr_assets.assets.daily import SHOWN_DAYS, DailyAsset, DailyCheck, shown_table
from sr_assets.assets.fleet import table_key
from sr_assets.stages.availability import AVAILABILITY_STAGE

if TYPE_CHECKING:
    from sr_assets.settings import Settings

#: As many nodes are in the table of the worst nodes.
_WORST: Final = 10


def _sources(settings: Settings) -> list[dg.AssetKey]:
    tables = ["node_availability", "node_advisories", *(["global_advisories"] if settings.feeds else [])]
    return [table_key(table) for table in tables]


def _metadata(settings: Settings, last: date) -> dict[str, Any]:
    """Return the picture of the last days, and the worst nodes of them."""
    from sr_assets.assets.pictures import line_chart

    since = last - timedelta(days=SHOWN_DAYS - 1)
    days = availability_queries.availability(settings.home, by="day", since=since)
    worst = availability_queries.availability(settings.home, by="node", since=since, most=_WORST)
    at, percent = days.columns.index("date"), days.columns.index("availability_percent")
    line = [(str(row[at]), row[percent]) for row in days.values if row[percent] is not None]
    return {
        "availability": dg.MetadataValue.md(line_chart("availability by day", "availability, %", {"": line})),
        "worst_nodes": shown_table(worst),
    }


AVAILABILITY_ASSET: Final = DailyAsset(
    AVAILABILITY_STAGE,
    "node and day on which it was known",
    _sources,
    {
        "seconds_add_up": DailyCheck(
            "Up, silent, retired and blind seconds add up to the time of the day since the node was first seen.",
            availability_queries.wrong_sums,
        ),
        "no_node_missing": DailyCheck(
            "Every node that was known on the day has a row.", availability_queries.missing_nodes
        ),
    },
    _metadata,
)
