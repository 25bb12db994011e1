"""`--watch`: a command's tables again and again, until Ctrl-C.

On a terminal they replace each other, as large as the window; anything else gets one after the other. Add `watchable` to a
command that only looks. Not here: the tables (`render`, `layout`).
"""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import time
from datetime import UTC, datetime
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console
from rich.text import Text

from sr_assets.cli.base import SECONDS, configured, form_option
from sr_assets.cli.layout import note
from sr_assets.domain.durations import duration
from sr_assets.domain.errors import ConfigurationError, SrAssetsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sr_assets.cli.render import Format
    from sr_assets.settings import Settings

_DEFAULT: Final = "2s"
_SHORTEST_SECONDS: Final = 0.1


def watchable(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command its settings, the options for how rows are shown, and `--watch`, which shows them again and again."""

    @click.option(
        "--watch",
        type=SECONDS,
        is_flag=False,
        flag_value=_DEFAULT,
        metavar="[DURATION]",
        help=f"Look again and again, with this pause, by default {_DEFAULT}, until Ctrl-C.",
    )
    @wraps(command)
    def with_watch(settings: Settings, *, form: Format, watch: float | None, **options: Any) -> Any:
        def look() -> Any:
            return command(settings, form=form, **options)

        if watch is None:
            return look()
        if form in ("json", "csv"):
            raise ConfigurationError(f"--watch shows tables, not {form}: leave one of the two out")
        if options.get("follow"):
            raise ConfigurationError(
                "--watch shows the table again and again, --follow what is new: leave one of the two out"
            )
        if watch < _SHORTEST_SECONDS:
            raise ConfigurationError(f"--watch {watch:g}: the pause is at least {_SHORTEST_SECONDS:g} s")
        return _watch(look, watch)

    return form_option(configured(with_watch))


def _watch(look: Callable[[], Any], pause_seconds: float) -> int:
    """Show what a command prints until an interrupt; returns the exit code. An error of the first look is raised."""
    from sr_assets.operate.processes import signals_as_interrupt

    with contextlib.suppress(KeyboardInterrupt), signals_as_interrupt(signal.SIGTERM):
        shown = _captured_output(look)
        with _refreshing_screen() as show:
            while True:
                heading = f"every {duration(pause_seconds)}, last at {datetime.now(UTC):%H:%M:%S} UTC, until Ctrl-C"
                show("".join(f"{line}\n" for line in note(heading)) + shown)
                time.sleep(pause_seconds)
                try:
                    shown = _captured_output(look)
                except SrAssetsError as error:
                    shown = f"error: {error}\n"
    return 0


def _captured_output(look: Callable[[], Any]) -> str:
    """Return what a command prints, its errors and warnings below its rows."""
    printed, remarks = _Captured(), _Captured()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(remarks):
        look()
    return printed.getvalue() + remarks.getvalue()


class _Captured(io.StringIO):
    """What is printed, as it would be on the real stdout."""

    def __init__(self) -> None:
        super().__init__()
        self._terminal = sys.stdout.isatty()

    def isatty(self) -> bool:
        """Return whether stdout is a terminal."""
        return self._terminal


@contextlib.contextmanager
def _refreshing_screen() -> Iterator[Callable[[str], None]]:
    """Yield the function that shows the newest output.

    On a terminal it replaces the output before, and the last output stays there at the end; elsewhere it goes below it.
    """
    console = Console()
    if not console.is_interactive:
        yield lambda shown: click.echo(f"{shown}\n", nl=False)
        return
    last = ""

    def show(shown: str) -> None:
        nonlocal last
        last = shown
        lines = list(Text.from_ansi(shown).wrap(console, console.width))
        if (left := len(lines) - console.height) > 0:
            lines[console.height - 1 :] = [Text(f"… and {left + 1} lines more", style="dim")]
        screen.update(Text("\n").join(lines))

    try:
        with console.screen() as screen:
            yield show
    finally:
        sys.stdout.write(last)
