"""`python -m sr_assets.operate SITE`: work one site, as the child process of `run_sites`."""

import argparse
import logging
import sys

from sr_assets.domain.errors import ConfigurationError, SrAssetsError
from sr_assets.operate.processes import INTERRUPTED, end_with_parent, signals_as_interrupt
from sr_assets.operate.report import complain
from sr_assets.operate.site import execute_site


def _main() -> int:
    """Work one site: the child process of `run_sites`."""
    from sr_assets.resources import configure_logging
    from sr_assets.settings import load_settings

    parser = argparse.ArgumentParser(prog="sr_assets.operate")
    parser.add_argument("site")
    parser.add_argument("--mode", choices=("once", "follow"), default="once")
    parser.add_argument("--stream", action="append", default=[])
    given = parser.parse_args()
    end_with_parent()
    try:
        with signals_as_interrupt():
            settings = load_settings()
            configure_logging(settings)
            _leave_errors_to_the_report()
            return execute_site(settings, given.site, given.stream, once=given.mode == "once")
    except SrAssetsError as error:
        complain(str(error))
        return 2 if isinstance(error, ConfigurationError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _leave_errors_to_the_report() -> None:
    """Keep errors off the log on stderr: a stream's failure is said there once, as a line of its own, at the end."""
    for handler in logging.getLogger("sr_assets").handlers:
        if not isinstance(handler, logging.FileHandler):
            handler.addFilter(lambda record: record.levelno < logging.ERROR)


if __name__ == "__main__":
    sys.exit(_main())
