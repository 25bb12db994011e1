"""`python -m sr_assets.operate SITE`: run one site, as the child process of `run_sites`."""

import argparse
import gc
import logging
import sys
from contextlib import AbstractContextManager, nullcontext

from sr_assets.adapters.logs import print_error
from sr_assets.domain.errors import ConfigurationError, SrAssetsError
from sr_assets.operate.processes import INTERRUPTED, end_with_parent, signals_as_interrupt
from sr_assets.operate.site import execute_site
from sr_assets.stages.leadership import logger as leadership_logger


def _main() -> int:
    """Run one site and return the exit code."""
    from sr_assets.resources import configure_logging
    from sr_assets.settings import load_settings

    parser = argparse.ArgumentParser(prog="sr_assets.operate")
    parser.add_argument("site")
    parser.add_argument("--mode", choices=("once", "follow"), default="once")
    parser.add_argument("--stream", action="append", default=[])
    parser.add_argument("--bars", action="store_true")
    arguments = parser.parse_args()
    end_with_parent()
    try:
        with signals_as_interrupt():
            settings = load_settings()
            configure_logging(settings)
            _leave_reported_lines_out(once=arguments.mode == "once")
            with _bars() if arguments.bars else nullcontext():
                return execute_site(settings, arguments.site, arguments.stream, once=arguments.mode == "once")
    except SrAssetsError as error:
        print_error(str(error))
        return 2 if isinstance(error, ConfigurationError) else 1
    except KeyboardInterrupt:
        pass
    # Generators that the interrupt left open publish what they hold; at the interpreter's end it would be too late.
    gc.collect()
    return INTERRUPTED


def _bars() -> AbstractContextManager[None]:
    """Return progress bars; rich is imported only by runs that draw them."""
    from sr_assets.operate.bars import progress_bars

    return progress_bars()


def _leave_reported_lines_out(*, once: bool) -> None:
    """Keep lines out of the log on stderr that the report prints: each stream's failure, and the leader of a single run.

    A defect's traceback stays, because the report does not print it.
    """

    def is_reported(record: logging.LogRecord) -> bool:
        names_leader = once and record.name == leadership_logger.name and record.levelno == logging.INFO
        return names_leader or (record.levelno >= logging.ERROR and record.exc_info is None)

    for handler in logging.getLogger("sr_assets").handlers:
        if not isinstance(handler, logging.FileHandler):
            handler.addFilter(lambda record: not is_reported(record))


if __name__ == "__main__":
    sys.exit(_main())
