"""What Dagster hands to assets: the configured platform, from which a run opens its site.

Here: opening a site for one Dagster run, always closed again. Not here: what is done with it (`stages`), the assets
themselves.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sr_assets.adapters.spark.engine import KEEP_ONCE_SECONDS, KEEP_SECONDS
from sr_assets.stages.site import Site

if TYPE_CHECKING:
    from sr_assets.settings import Settings

#: Tag of a run: `linger` (the sensors' runs wait for more until their budget is used), `once` (a single run of the
#: command line) or nothing: drain and end.
MODE_TAG = "sr_assets/mode"
LINGER = "linger"
ONCE = "once"
#: Metadata of a failure: true when another run cannot help, only another configuration.
MISCONFIGURED = "misconfigured"


@dataclass(frozen=True, slots=True)
class Platform:
    """The platform as configured; what every asset needs and nothing more."""

    settings: Settings

    def open_site(self, name: str, run_id: str, mode: str | None) -> Site:
        """Return a site to be entered with `with`: its lock, state and connections last until the end of that.

        `mode` is the run's `MODE_TAG`: after a single run of the command line the engine is soon not wanted any more.
        """
        configure_logging(self.settings)
        keep_seconds = KEEP_ONCE_SECONDS if mode == ONCE else KEEP_SECONDS
        return Site(self.settings, name, owner=f"run {run_id}", run_id=run_id, keep_engine_seconds=keep_seconds)


def configure_logging(settings: Settings) -> None:
    """Send our log to stderr, which Dagster captures with a run, and to `logfile` when there is one; once a process."""
    ours = logging.getLogger("sr_assets")
    if ours.handlers:
        return
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if settings.logfile is not None:
        handlers.append(logging.FileHandler(settings.logfile))
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        ours.addHandler(handler)
    ours.setLevel(settings.loglevel.upper())
