"""An asset of this project, computed from a table of the platform."""

import dagster as dg
from dagster_duckdb import DuckDBResource


@dg.asset(deps=[dg.AssetKey(["choria", "fleet", "last_seen_nodes"])])
def silent_nodes(choria_fleet_tables: DuckDBResource) -> dg.MaterializeResult:
    """Count the nodes that are silent now."""
    with choria_fleet_tables.get_connection() as connection:
        rows = connection.execute("SELECT node FROM last_seen_nodes WHERE status = 'timeout' ORDER BY node").fetchall()
    return dg.MaterializeResult(metadata={"dagster/row_count": len(rows), "nodes": [node for (node,) in rows[:20]]})
