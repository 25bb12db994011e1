"""Where the package's log lines go: `loglevel` and `logfile` of the configuration, for every process we start.

Not here: what is logged; Dagster's own event log and console.
"""

import logging
import sys
from typing import Final

from sr_assets.domain.errors import ConfigurationError
from sr_assets.settings import Settings

LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}


def configure_logging(settings: Settings) -> None:
    """Send the lines of `sr_assets` to `logfile`, else to stderr, from `loglevel` on; called again it replaces the first.

    Raises ConfigurationError when the file cannot be written.
    """
    try:
        handler = logging.FileHandler(settings.logfile) if settings.logfile else logging.StreamHandler(sys.stderr)
    except OSError as error:
        raise ConfigurationError(f"logfile: {settings.logfile} cannot be written: {error.strerror}") from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("sr_assets")
    for old in ours.handlers:
        old.close()
    ours.handlers, ours.propagate = [handler], False
    ours.setLevel(LEVELS[settings.loglevel])
