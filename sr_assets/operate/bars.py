"""Progress bars on a terminal for long work: amount done, rate and remaining time."""

import contextlib
import os
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from sr_assets.adapters.progress_lines import show_on


@contextlib.contextmanager
def progress_bars() -> Iterator[None]:
    """Show this process's long work as bars on stderr inside the block, if stderr is an interactive terminal."""
    # Dagster redirects stderr into a run's log, so write to a duplicate of the descriptor.
    with contextlib.ExitStack() as stack:
        if sys.stderr.isatty():
            terminal = stack.enter_context(os.fdopen(os.dup(sys.stderr.fileno()), "w"))
            console = Console(file=terminal)
            if console.is_interactive:
                stack.enter_context(show_on(stack.enter_context(Bars(console))))
        yield


class _Rate(TextColumn):
    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        """Return the rate per second."""
        return Text(f"{task.speed or 0.0:,.0f}/s")


class Bars(contextlib.AbstractContextManager["Bars"]):
    """A bar for each piece of work in progress."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), _Rate())
        # Without redirection, the output of commands stays on stdout.
        self._progress = Progress(
            *columns,
            TimeRemainingColumn(),
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._tasks: dict[str, TaskID] = {}

    def __exit__(self, *_: object) -> None:
        """Remove the bars."""
        self._progress.stop()

    def show(self, work: str, done: int, total: int) -> None:
        """Draw the progress of a piece of work."""
        if work not in self._tasks:
            self._progress.start()
            self._tasks[work] = self._progress.add_task(work, total=total)
        self._progress.update(self._tasks[work], completed=done, total=total)

    def end(self, work: str) -> None:
        task = self._tasks.pop(work, None)
        if task is not None:
            self._progress.refresh()
            self._progress.remove_task(task)
