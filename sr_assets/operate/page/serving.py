"""Who is shown the status page beside the metrics, and how often it is made anew.

Unlike metrics it has the names of nodes: whoever may not read the published tables is not shown it. Not here: the HTTP server
(`operate.metrics.serving`).
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Final

from sr_assets.operate.page.rendering import render_problem
from sr_assets.operate.ui_access import peer_user, refuse_foreign_page

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sr_assets.settings import Settings

#: Where the page is.
PAGE_PATHS: Final = ("/", "/status")
PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_REFRESH_SECONDS: Final = 30
#: The page is made anew at most so often; making it takes at most this share of a core.
_KEEP_SECONDS: Final = 5.0
_SHARE: Final = 0.05
_OTHERS_MAY_READ: Final = 0o004
_PRIVATE: Final = (
    "the published tables are private, so only their owner is shown this page; published_mode 0644 shows it to others"
)


class PagePublisher:
    """The page of a home for many who ask at once."""

    def __init__(self, settings: Settings) -> None:
        """Take the configuration."""
        self._settings = settings
        self._guard = threading.Lock()
        self._page, self._until = "", 0.0

    def page(self) -> str:
        """Return the page, made some seconds ago at most."""
        with self._guard:
            began = time.monotonic()
            if began >= self._until:
                self._page = render_problem(self._settings, _REFRESH_SECONDS)
                ended = time.monotonic()
                self._until = ended + max(_KEEP_SECONDS, (ended - began) / _SHARE)
            return self._page

    def refusal(
        self, headers: Iterable[tuple[str, str]], client: tuple[str, int], server: tuple[str, int]
    ) -> str | None:
        """Return why a client is not shown the page; None when it is.

        Tables that everybody may read are shown to everybody; others to their owner, on this machine, and to no page of
        another site.
        """
        if self._settings.published_mode & _OTHERS_MAY_READ:
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
        return None if peer_user(client, server) in (None, 0, os.geteuid()) else _PRIVATE
