"""The `sr-assets` command: thin, one function per command.

Here: options, which question or stage a command is, exit codes. Add a command to the module of its subject: `advisories`,
`availability`, `enrolling`, `importing`, `metrics`, `nodes`, `page`, `report`, `streams`, `tables`, `topology`, `work`.
Not here: how rows are drawn (`render`), the SQL (`adapters.published.queries`), the work itself.
"""

from sr_assets.cli import (  # noqa: F401  the commands register themselves
    advisories,
    availability,
    enrolling,
    importing,
    metrics,
    nodes,
    page,
    report,
    streams,
    tables,
    topology,
    work,
)
from sr_assets.cli.base import main, run_command

__all__ = ["main", "run_command"]
