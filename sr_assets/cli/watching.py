"""`--watch`: refreshing a command's tables until Ctrl-C.

On a terminal each table replaces the previous one; a pipe receives them one after the other.
"""

from __future__ import annotations

import contextlib
import io
import signal
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import click

from sr_assets.adapters import times
from sr_assets.cli.base import SECONDS, configured, echo_document, form_option
from sr_assets.cli.render import Format, note
from sr_assets.domain.durations import duration
from sr_assets.domain.errors import ConfigurationError, SrAssetsError

if TYPE_CHECKING:
    from sr_assets.settings import Settings

_DEFAULT: Final = "2s"
_SHORTEST_SECONDS: Final = 0.1


def watchable(command: Callable[..., Any]) -> Callable[..., Any]:
    """Pass the settings to a read-only command, and add the output options and `--watch`."""

    @click.option(
        "--watch",
        type=SECONDS,
        is_flag=False,
        flag_value=_DEFAULT,
        metavar="[DURATION]",
        help=f"Refresh until Ctrl-C, pausing this long in between (default {_DEFAULT}).",
    )
    @wraps(command)
    def with_watch(settings: Settings, *, form: Format, watch: float | None, **options: Any) -> Any:
        def refresh() -> Any:
            return command(settings, form=form, **options)

        if watch is None:
            return refresh()
        if form in ("json", "csv"):
            raise ConfigurationError(f"--watch prints tables, not {form}; omit one of the two options")
        if options.get("follow"):
            raise ConfigurationError("--watch and --follow exclude each other; omit one of them")
        if watch < _SHORTEST_SECONDS:
            raise ConfigurationError(f"--watch {watch:g} is too short; the minimum is {_SHORTEST_SECONDS:g} s")
        return _watch(refresh, watch)

    return form_option(configured(with_watch))


def _watch(refresh: Callable[[], Any], pause_seconds: float) -> int:
    """Print a command's output repeatedly until an interrupt, and return the exit code.

    The first call raises its errors; later calls print them.
    """
    from sr_assets.operate.processes import signals_as_interrupt

    with contextlib.suppress(KeyboardInterrupt), signals_as_interrupt(signal.SIGTERM):
        shown = _captured_output(refresh)
        with _refreshing_screen() as show:
            while True:
                heading = f"every {duration(pause_seconds)} until Ctrl-C, last at {times.utc_now():%H:%M:%S} UTC"
                show("".join(f"{line}\n" for line in note(heading)) + shown)
                times.sleep(pause_seconds)
                try:
                    shown = _captured_output(refresh)
                except SrAssetsError as error:
                    shown = f"error: {error}\n"
    return 0


def _captured_output(refresh: Callable[[], Any]) -> str:
    """Return a command's output, with its errors and warnings below its rows."""
    printed, remarks = _Captured(), _Captured()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(remarks):
        refresh()
    return printed.getvalue() + remarks.getvalue()


class _Captured(io.StringIO):
    """Captured output that reports stdout's terminal status."""

    def __init__(self) -> None:
        super().__init__()
        self._terminal = sys.stdout.isatty()

    def isatty(self) -> bool:
        """Return whether stdout is a terminal."""
        return self._terminal


@contextlib.contextmanager
def _refreshing_screen() -> Iterator[Callable[[str], None]]:
    """Yield a function that prints the newest output.

    On a terminal it replaces the previous output, and the last output stays visible at the end.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console()
    if not console.is_interactive:
        yield lambda shown: echo_document(f"{shown}\n")
        return
    last = ""

    def show(shown: str) -> None:
        nonlocal last
        last = shown
        lines = list(Text.from_ansi(shown).wrap(console, console.width))
        if (left := len(lines) - console.height) > 0:
            lines[console.height - 1 :] = [Text(f"… and {left + 1} more lines", style="dim")]
        screen.update(Text("\n").join(lines))

    try:
        with console.screen() as screen:
            yield show
    finally:
        sys.stdout.write(last)
