"""The `sr-assets` command: thin, one function per command.

Here: options, which query or stage a command is, what is printed, exit codes. Not here: how rows are drawn (`render`),
the work itself.
"""

from sr_assets.cli import central, look, work  # noqa: F401  the commands register themselves
from sr_assets.cli.base import main, run_command

__all__ = ["main", "run_command"]
