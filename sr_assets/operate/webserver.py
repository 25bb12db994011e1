"""Dagster's UI with access control, a child process of `services`; it also serves the documents under `/docs/`."""

import asyncio
import itertools
import logging
import re
import resource
from pathlib import Path
from typing import Any, Final

from markdown_it import MarkdownIt
from starlette.responses import HTMLResponse, RedirectResponse
from starlette.staticfiles import StaticFiles

from sr_assets.dagster_internals import dagster_ui
from sr_assets.domain.clusters import is_loopback
from sr_assets.operate.ui_access import (
    Access,
    AccessMiddleware,
    Application,
    Logins,
    Receive,
    Scope,
    Send,
    Ui,
    ui_sockets,
    user_number,
)

_FOLDER: Final = Path(__file__).parents[1] / "docs"
#: The built site, if there is one: `make docs`, and the packages, make it.
_SITE: Final = Path(__file__).parents[1] / "site"
_PATH: Final = re.compile(r"/docs/([a-z]+\.md)")
_PAGE: Final = """<!doctype html>
<meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 15px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }}
table {{ border-collapse: collapse }} td, th {{ border: 1px solid #ccc; padding: 0.3em 0.6em; vertical-align: top }}
pre, code {{ background: #f4f4f4 }} pre {{ padding: 0.8em; overflow: auto }}</style>
{body}
"""

#: The most connections; fewer if the process may open few files, because Dagster's gRPC aborts it without a descriptor.
_MOST_CONNECTIONS: Final = 256
_SHARE_OF_DESCRIPTORS: Final = 4
#: Connections that the event loop may accept at once, before it can close any.
_MOST_ACCEPTED: Final = 64
#: The longest wait for the head of a request; after a response, uvicorn's shorter limit holds for a silent client.
_HEAD_SECONDS: Final = 10
_CHECK_SECONDS: Final = 1.0


class DocumentsMiddleware:
    """An ASGI application that answers `/docs/…` and passes other requests on.

    The documents are the pages of the site; without a site, `/docs/<name>.md` is that document as plain HTML.
    """

    def __init__(self, application: Application, site: Path = _SITE) -> None:
        self._application = application
        self._site = StaticFiles(directory=site, html=True) if (site / "index.html").exists() else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        path = scope["path"] if scope["type"] == "http" else ""
        match = _PATH.fullmatch(path)
        if self._site is not None and (match or path == "/docs"):
            # The browser keeps the anchor.
            await RedirectResponse(f"/docs/{match[1].removesuffix('.md')}/" if match else "/docs/")(
                scope, receive, send
            )
        elif self._site is not None and path.startswith("/docs/"):
            await self._site({**scope, "root_path": "/docs"}, receive, send)
        elif page := document_page(match[1]) if match else None:
            await HTMLResponse(page)(scope, receive, send)
        else:
            await self._application(scope, receive, send)


def document_page(name: str) -> str | None:
    """Return a document as HTML whose headings have the anchors that links use, or None if it does not exist."""
    file = _FOLDER / name
    if not file.is_file():
        return None
    markdown = MarkdownIt("commonmark").enable("table")
    tokens = markdown.parse(file.read_text())
    for heading, content in itertools.pairwise(tokens):
        if heading.type == "heading_open":
            heading.attrSet("id", anchor(content.content))
    return _PAGE.format(title=name, body=markdown.renderer.render(tokens, markdown.options, {}))


def anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def serve_ui(workspace: Path, ui: Ui, log_level: str) -> int:
    """Serve the UI of a workspace file until SIGTERM; return the exit code."""
    import uvicorn

    logging.basicConfig(level=log_level.upper())
    logins = Logins(ui.auth_file) if ui.auth_file else None
    hosts = frozenset(host.lower() for host in ui.public_hosts)
    any_host = not hosts and (ui.trust_proxy is not None or not is_loopback(ui.host))
    proxy_user = user_number(ui.trust_proxy) if ui.trust_proxy else None
    access = Access(logins, any_host, proxy_user, hosts)
    with dagster_ui(workspace, read_only=ui.read_only) as application:
        # Access control needs the connection's own addresses, not those in a client's headers.
        guarded = AccessMiddleware(DocumentsMiddleware(application), access)
        protocol = bounded_protocol(most_connections())
        config = uvicorn.Config(
            guarded, http=protocol, log_level="warning", proxy_headers=False, backlog=_MOST_ACCEPTED
        )
        uvicorn.Server(config).run(sockets=ui_sockets(ui.host, ui.port))
    return 0


def most_connections() -> int:
    """Return how many connections this process may hold."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if soft < 0 else max(1, min(_MOST_CONNECTIONS, soft // _SHARE_OF_DESCRIPTORS))


def bounded_protocol(most: int) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol with at most this many connections, each for seconds without a complete head.

    A further connection takes the place of the oldest one without a request, or is closed if all others have one. Only a
    client with access keeps a request for long.
    """
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    # In the order of their arrival; those that became web sockets are only in uvicorn's set.
    opened: dict[Any, None] = {}
    aborted: set[Any] = set()

    class Bounded(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        @property
        def waits(self) -> bool:
            """Whether no request is being answered."""
            return self.cycle is None or bool(self.cycle.response_complete)

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            opened[self] = None
            self._seen, self._waited_seconds = self.cycle, 0.0
            self._check = self.loop.call_later(_CHECK_SECONDS, self._limit)
            if len(self.connections) - len(aborted) > most:
                next((each for each in opened if each.waits), self).give_way()

        def give_way(self) -> None:
            """Close the connection now."""
            opened.pop(self, None)
            aborted.add(self)
            self.transport.abort()

        def _limit(self) -> None:
            if self not in self.connections:  # a web socket now
                opened.pop(self, None)
                return
            is_waiting = self.waits and self.cycle is self._seen
            self._waited_seconds = self._waited_seconds + _CHECK_SECONDS if is_waiting else 0.0
            self._seen = self.cycle
            if self._waited_seconds >= _HEAD_SECONDS:
                self.give_way()
            else:
                self._check = self.loop.call_later(_CHECK_SECONDS, self._limit)

        def connection_lost(self, error: Exception | None) -> None:
            opened.pop(self, None)
            aborted.discard(self)
            self._check.cancel()
            super().connection_lost(error)

    return Bounded
