"""The times at which a run polls a site that has caught up: all entries together, so that one publication shows a poll."""

import time
from collections.abc import Callable

from sr_assets.adapters import times
from sr_assets.domain.sizing import poll_seconds


class Pace:
    """The polls of one site; `sites_served` returns the number of sites that the process serves, `linger_seconds` are the run's.

    The interval follows the cost of a poll: the CPU time of the process since the poll before, divided by its sites.
    """

    def __init__(self, linger_seconds: float, sites_served: Callable[[], int]) -> None:
        self._linger_seconds, self._sites_served = linger_seconds, sites_served
        self._cost_seconds = 0.0
        self._used_seconds = time.process_time()
        #: When an entry that has caught up is polled again (monotonic seconds).
        self.next_poll_at = 0.0

    def begin_round(self) -> None:
        """Set the time of the next poll if the last one is over; call it before the entries take their steps."""
        now, used_seconds, sites = times.monotonic(), time.process_time(), self._sites_served()
        if now < self.next_poll_at:
            return
        if self.next_poll_at:
            # The mean with the polls before: one that catches up costs more, and says little of the next.
            self._cost_seconds = (self._cost_seconds + (used_seconds - self._used_seconds) / sites) / 2
        self._used_seconds = used_seconds
        self.next_poll_at = now + poll_seconds(self._cost_seconds, self._linger_seconds, sites)
