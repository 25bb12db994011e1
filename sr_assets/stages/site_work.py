"""The work of one run on a site. It may begin before the run: Dagster takes seconds to import.

The run then continues the rounds of the open site.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Final, Self

from sr_assets.stages.report import Stage
from sr_assets.stages.run import SiteRun
from sr_assets.stages.site import Site


class SiteWork(ExitStack):
    """A site, open inside the block, and the `rounds` of its `run` on the stages of `selection`; it `lingers` or drains.

    Entering it again continues the work. Entering raises what `Site` does; each end closes the rounds and the site.
    """

    def __init__(self, site: Site, selection: Mapping[str, frozenset[Stage]], *, lingers: bool) -> None:
        super().__init__()
        self.site = site
        self._selection, self._lingers = selection, lingers
        self._has_begun = False

    def __enter__(self) -> Self:
        if not self._has_begun:
            with ExitStack() as stack:
                stack.enter_context(self.site)
                self.run = SiteRun(self.site, self._selection, drain_only=not self._lingers)
                self.rounds: Generator[bool] = stack.enter_context(closing(self.run.rounds()))
                self.push(stack.pop_all())
            self._has_begun = True
        return self


#: The work of this process that began before its run, or the error that ended it, by run.
_begun: Final = dict[str, SiteWork | Exception]()


@contextmanager
def head_start(run_id: str, begin: Callable[[], SiteWork], ready: Future[Any]) -> Iterator[None]:
    """Do the work of a run until it is `ready` to start; `work_of` returns it inside the block, whose end ends the work."""
    with ExitStack() as stack:
        try:
            with ExitStack() as beginning:
                work = beginning.enter_context(begin())
                ready.add_done_callback(lambda _: work.site.woken.set())
                for _ in work.rounds:
                    if ready.done():
                        break
                _begun[run_id] = work
                # An interrupted run may leave it open.
                stack.push(beginning.pop_all())
        except Exception as error:  # noqa: BLE001  raised by the run, which records it
            _begun[run_id] = error
        stack.callback(_begun.pop, run_id)
        yield


def work_of(run_id: str, begin: Callable[[], SiteWork]) -> SiteWork:
    """Return the work of a run, which has had a head start or begins now; raise the error of a head start."""
    begun = _begun.get(run_id)
    if isinstance(begun, Exception):
        raise begun
    return begun or begin()
