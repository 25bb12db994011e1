"""The plan and settings of a writer that a test runs in its own process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from sr_assets.adapters.connection_file import write_connection
from sr_assets.adapters.copying.copy_plan import CopyPlan
from sr_assets.settings import ClusterSettings
from sr_assets_tests.rig import SITE

BATCH = "b1"


def copy_plan(folder: Path, cluster: ClusterSettings, source: str, target: str, **changes: Any) -> CopyPlan:
    """Plan to copy messages 1 to 20,000 of a stream into another of the same cluster, with the subject prefix `to.`."""
    connection_file = str(write_connection(folder / "connection", cluster))
    (folder / "batch").write_text(BATCH)
    plan = CopyPlan(
        connection=connection_file,
        stream=target,
        subjects=(f"to.{source}.>",),
        source_connection=connection_file,
        source_stream=source,
        direct=True,
        replicator=SITE,
        name=SITE,
        created_ns=1_700_000_000_000_000_000,
        prefix="to",
        remove="",
        first=1,
        next=20_001,
        since=0,
        folder=str(folder),
        batch=BATCH,
    )
    return replace(plan, **changes)
