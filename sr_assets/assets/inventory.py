"""The asset `["fleet", "inventory_daily"]`: on how many nodes each class, agent, version, OS family and fact was, by day.

Here: what is recorded of it, and its checks. Not here: what daily tables have in common (`daily`), the computation
(`stages.inventory`), its picture (`pictures`).
"""

from __future__ import annotations

from datetime import date, timedelta
from typing import TYPE_CHECKING, Any, Final

import dagster as dg

from sr_assets.adapters.published import inventory as inventory_queries
from sr_assets.assets.daily import SHOWN_DAYS, DailyAsset, DailyCheck, shown_table
from sr_assets.assets.fleet import table_key
from sr_assets.stages.inventory import INVENTORY_STAGE

if TYPE_CHECKING:
    from sr_assets.settings import Settings

#: The picture shows the rollout of new versions; so many of them.
_DRAWN: Final = "agent_version"
_MOST_LINES: Final = 6
#: As many values of each property are in the table.
_MOST_VALUES: Final = 5


def _metadata(settings: Settings, last: date) -> dict[str, Any]:
    """Return the picture of the last days' versions, and the values that most nodes had on the last one."""
    from sr_assets.assets.pictures import line_chart

    since = last - timedelta(days=SHOWN_DAYS - 1)
    lines: dict[str, list[tuple[str, float]]] = {}
    for when, value, nodes in inventory_queries.values_by_day(settings.home, _DRAWN, since, _MOST_LINES).values:
        lines.setdefault(value, []).append((str(when), nodes))
    return {
        "versions": dg.MetadataValue.md(line_chart("nodes by agent version", "nodes", lines)),
        "values": shown_table(inventory_queries.values_of_day(settings.home, last, _MOST_VALUES)),
    }


INVENTORY_ASSET: Final = DailyAsset(
    INVENTORY_STAGE,
    "day, stream, property and value",
    lambda _: [table_key(table) for table in ("node_snapshots", "node_availability", "node_advisories")],
    {
        "values_add_up": DailyCheck(
            "The nodes of a property's values add up to the nodes of the day.", inventory_queries.wrong_sums
        ),
        "no_node_missing": DailyCheck(
            "Every node with a message that was copied on the day is counted.", inventory_queries.missing_nodes
        ),
    },
    _metadata,
)
