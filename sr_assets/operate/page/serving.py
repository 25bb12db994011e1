"""Access to the status page next to the metrics, and its cache.

Unlike metrics, the page contains names of nodes: only users who may read the published tables may see it.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Final

from sr_assets.adapters import times
from sr_assets.operate.health import OTHERS_MAY_READ
from sr_assets.operate.page.rendering import render_problem
from sr_assets.operate.ui_access import refuse_foreign_page
from sr_assets.settings import Settings

PAGE_PATHS: Final = ("/", "/status")
PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_REFRESH_SECONDS: Final = 30
#: The shortest time between two renderings, and the share of a core that they may take.
_KEEP_SECONDS: Final = 5.0
_SHARE: Final = 0.05
_PRIVATE: Final = (
    "this page is for the owner of the published tables only; set published_mode: 0644 to show it to other users"
)


class PagePublisher:
    """The cached status page of a home, shared by concurrent requests."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._guard = threading.Lock()
        self._page, self._until = "", 0.0

    def page(self) -> str:
        """Return the page, at most a few seconds old."""
        with self._guard:
            began = times.monotonic()
            if began >= self._until:
                self._page = render_problem(self._settings, _REFRESH_SECONDS)
                ended = times.monotonic()
                self._until = ended + max(_KEEP_SECONDS, (ended - began) / _SHARE)
            return self._page

    def refusal(self, headers: Iterable[tuple[str, str]], is_owner: Callable[[], bool]) -> str | None:
        """Return why a client may not see the page, or None if it may.

        World-readable tables may be seen by everyone. Others only by their owner on this machine, and not in cross-site
        requests.
        """
        if self._settings.published_mode & OTHERS_MAY_READ:
            return None
        scope = {
            "type": "http",
            "method": "GET",
            "path": PAGE_PATHS[0],
            "query_string": b"",
            "headers": [(key.lower().encode("latin-1"), value.encode("latin-1")) for key, value in headers],
        }
        if foreign := refuse_foreign_page(scope):
            return foreign.line
        return None if is_owner() else _PRIVATE
