"""What every asset's page says beside its own numbers: where it is documented, its columns and rows, its last day by hour.

Not here: what an asset records of its own (its module), the pictures (`pictures`), the arithmetic of hours (`domain.hours`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import dagster as dg

from sr_assets.assets.pictures import hourly_chart
from sr_assets.domain.hours import carried_on, hours_until

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sr_assets.domain.hours import Hours

#: The metadata that the next run carries on.
BY_HOUR: Final = "by_hour"
#: A stream's messages as the rows of a table.
MESSAGE_COLUMNS: Final = {
    "sequence": "BIGINT",
    "subject": "VARCHAR",
    "stored_at": "TIMESTAMPTZ",
    "headers": "BLOB",
    "payload": "BLOB",
}


def documented(text: str, where: str) -> str:
    """Return an asset's description with the place in `docs/` that explains it."""
    return f"{text} See `docs/{where}`."


def table_metadata(columns: Mapping[str, str], rows: int) -> dict[str, Any]:
    """Return the columns, by their names and types, and the number of rows, as Dagster shows them for every table."""
    schema = dg.TableSchema([dg.TableColumn(name, kind) for name, kind in columns.items()])
    return {"dagster/column_schema": dg.MetadataValue.table_schema(schema), "dagster/row_count": rows}


class Page(NamedTuple):
    """An asset as a table, and what its picture shows: numbers that add up over an hour, and numbers as they are now."""

    columns: Mapping[str, str]
    rows: int
    sums: Mapping[str, int] = {}
    levels: Mapping[str, int] = {}

    def metadata(self, earlier: Hours, now_ns: int) -> dict[str, Any]:
        """Return what is recorded of it; `earlier` are the hours that the last run recorded."""
        table = table_metadata(self.columns, self.rows)
        if not (self.sums or self.levels):
            return table
        hours = carried_on(earlier, now_ns, self.sums, self.levels)
        shown = hours_until(now_ns)
        lines = {name: [hours.get(hour, {}).get(name) for hour in shown] for name in (*self.sums, *self.levels)}
        picture = dg.MetadataValue.md(hourly_chart("the last day by hour", shown, lines))
        return {**table, BY_HOUR: dg.MetadataValue.json(hours), "last_day": picture}


def hours_recorded(instance: dg.DagsterInstance, key: dg.AssetKey) -> Hours:
    """Return the hours that an asset's last run recorded; none without one."""
    event = instance.get_latest_materialization_event(key)
    recorded = event.asset_materialization.metadata.get(BY_HOUR) if event and event.asset_materialization else None
    return recorded.value if isinstance(recorded, dg.JsonMetadataValue) and isinstance(recorded.value, dict) else {}
