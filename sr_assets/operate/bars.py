"""Progress bars on a terminal for long work: present step, amount done, rate and remaining time."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Final

from sr_assets.adapters.progress_lines import show_on
from sr_assets.domain.foreign_text import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

#: The end of the bars' line, and the sequence that shows the cursor.
_END: Final = b"\n\x1b[?25h"


@contextlib.contextmanager
def progress_bars(*, still: bool = False) -> Iterator[None]:
    """Show this process's long work as bars on stderr inside the block, if stderr is an interactive terminal.

    `still` bars are drawn by the work itself, without a thread, which would delay what a command measures. As a decorator, it
    shows the work of a function.
    """
    # Dagster redirects stderr into a run's log, so write to a duplicate of the descriptor.
    with contextlib.ExitStack() as stack:
        if sys.stderr.isatty():
            # Imported only by those who see bars.
            from rich.console import Console

            terminal = stack.enter_context(os.fdopen(os.dup(sys.stderr.fileno()), "w", errors="replace"))
            console = Console(file=terminal)
            if console.is_interactive:
                stack.enter_context(_cursor_after_sigterm(terminal.fileno()))
                stack.enter_context(show_on(stack.enter_context(Bars(console, still=still))))
        yield


@contextlib.contextmanager
def _cursor_after_sigterm(terminal: int) -> Iterator[None]:
    """Show the cursor, which bars hide, before SIGTERM ends the process inside the block, unless SIGTERM has a handler."""

    def end(number: int, _: FrameType | None) -> None:
        # Not by rich: its lock may be taken.
        os.write(terminal, _END)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Bars(contextlib.AbstractContextManager["Bars"]):
    """A bar for each piece of work in progress; without any, the terminal belongs to the command's output."""

    def __init__(self, console: "Console", *, still: bool) -> None:
        from rich import progress

        columns = (progress.SpinnerColumn("line"), progress.TextColumn("{task.description}", markup=False))
        # Without redirection, the output of commands stays on stdout.
        self._progress = progress.Progress(
            *columns,
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            "{task.fields[rate]}",
            progress.TimeRemainingColumn(),
            console=console,
            auto_refresh=not still,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._tasks: dict[str, TaskID] = {}
        self._still = still

    def __exit__(self, *_: object) -> None:
        """Remove the bars."""
        self._progress.stop()

    def show(self, work: str, done: int, total: int | None, step: str = "") -> None:
        """Draw the progress of a piece of work; its bar pulses without a total."""
        text = visible(f"{work} {step}")
        if work not in self._tasks:
            self._tasks[work] = self._progress.add_task(text, total=total, rate="")
        self._progress.start()
        shown = self._tasks[work]
        self._progress.update(shown, description=text, completed=done, total=total)
        speed = next((task.speed for task in self._progress.tasks if task.id == shown), None)
        # A few slow parts, such as tables, have none.
        self._progress.update(shown, rate=f"{speed:,.0f}/s" if speed and speed >= 2.0 else "", refresh=self._still)

    def end(self, work: str) -> None:
        task = self._tasks.pop(work, None)
        if task is not None:
            self._progress.refresh()
            self._progress.remove_task(task)
            if not self._tasks:
                self._progress.stop()
