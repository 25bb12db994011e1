"""The run of a measured stream: the site's process of `run --follow` or `run --once`, unless a run is active."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from sr_assets.adapters import times
from sr_assets.adapters.logs import print_error
from sr_assets.adapters.state.lock import lock_owner
from sr_assets.domain.errors import RunError, SrAssetsError, cannot_write
from sr_assets.measure.measured_stream import MeasuredStream
from sr_assets.operate.copies import Copies
from sr_assets.operate.processes import Child, stop_groups

LOG_FILE: Final = "run.log"
#: A busy machine takes long to import Dagster.
START_SECONDS: Final = 180.0
_POLL_SECONDS: Final = 0.05


class MeasuredRun:
    """A run of a stream's site; `began_ns` is the beginning of its work (unix ns)."""

    def __init__(self, child: Child | None, log: Path) -> None:
        self.began_ns = times.time_ns()
        self._child, self._log = child, log

    @property
    def has_ended(self) -> bool:
        """Whether our child has ended."""
        return self._child is not None and self._child.poll() is not None

    def check(self) -> None:
        """Raise RunError if our child has failed."""
        code = self._child.poll() if self._child else None
        if code:
            lines = self._log.read_text(errors="replace").strip().splitlines()
            last = lines[-1].removeprefix("error: ") if lines else "no output"
            raise RunError(f"the run ended with exit code {code}: {last}; see {self._log}")

    def wait(self) -> None:
        """Wait until our child has ended; raises RunError if it has failed."""
        if self._child is not None:
            self._child.wait()
            self.check()


@contextmanager
def following(stream: MeasuredStream, folder: Path) -> Iterator[MeasuredRun]:
    """Follow the stream inside the block, in a child process unless a run of the site is active.

    The child's log is in `folder`. Raises RunError if it does not begin.
    """
    site = stream.settings.home / "sites" / stream.entry.name
    if lock_owner(site) is not None:
        yield MeasuredRun(None, folder / LOG_FILE)
        return
    with started(stream, folder, "follow") as run:
        yield run


@contextmanager
def started(stream: MeasuredStream, folder: Path, mode: str) -> Iterator[MeasuredRun]:
    """Start a child that runs the stream `once` or `follow`s it, and wait until it works; stop it after the block."""
    log, site = folder / LOG_FILE, stream.settings.home / "sites" / stream.entry.name
    try:
        output = log.open("ab")
    except OSError as error:
        raise RunError(cannot_write(log, error)) from None
    work = partial(_run_site, stream.entry.name, stream.entry.label, once=mode == "once")
    with (
        output,
        Copies() as copies,
        copies.start(site.name, work, errors=output.fileno(), output=output.fileno()) as child,
    ):
        try:
            deadline = times.monotonic() + START_SECONDS
            while lock_owner(site) is None and child.poll() is None:
                if times.monotonic() > deadline:
                    raise RunError(f"the run did not begin within {START_SECONDS:.0f} s; see {log}")
                times.sleep(_POLL_SECONDS)
            run = MeasuredRun(child, log)
            run.check()
            yield run
        finally:
            stop_groups([child])


def _run_site(site: str, label: str, *, once: bool) -> int:
    """Prepare the home, then run the site like its child process of `run`."""
    from sr_assets.operate.instance import mark_start, prepare_instance, prepare_storage
    from sr_assets.operate.site import site_process
    from sr_assets.settings import load_settings

    try:
        settings = load_settings()
        folder = prepare_instance(settings)
        mark_start(settings)
        prepare_storage(folder)
    except SrAssetsError as error:
        print_error(str(error))
        return 1
    return site_process(site, [label], once=once, bars=False)
