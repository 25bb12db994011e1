"""The `sr-assets` command: one thin function per command, in the module of its subject."""

from sr_assets.cli import (  # noqa: F401  the commands register themselves
    advisories,
    data,
    emulating,
    enrolling,
    importing,
    init,
    maintenance,
    measuring,
    members,
    nodes,
    page,
    permissions,
    replaying,
    report,
    schema,
    spark,
    streams,
    tables,
    topology,
    work,
)
from sr_assets.cli.base import main, run_command

__all__ = ["main", "run_command"]
