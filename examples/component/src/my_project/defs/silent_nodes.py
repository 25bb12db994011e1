"""An asset of this project, computed whenever a table of the platform has changed."""

import dagster as dg
import pandas as pd


@dg.asset(
    ins={
        "silent": dg.AssetIn(
            key=["choria", "fleet", "last_seen_nodes"],
            metadata={"columns": ["name", "node", "last_seen"], "where": "status = 'timeout'"},
        )
    },
    automation_condition=dg.AutomationCondition.eager(),
)
def silent_nodes(silent: pd.DataFrame) -> dg.MaterializeResult:
    """Count the nodes that are silent now."""
    nodes = silent["node"].sort_values().head(20).to_list()
    return dg.MaterializeResult(metadata={"dagster/row_count": len(silent), "nodes": nodes})
