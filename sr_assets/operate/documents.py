"""The documents under `/docs/` of the webserver, to which the descriptions of assets link."""

import itertools
import re
from pathlib import Path
from typing import Final

from markdown_it import MarkdownIt

from sr_assets.operate.ui_access import Application, Receive, Scope, Send

_FOLDER: Final = Path(__file__).parents[1] / "docs"
_PATH: Final = re.compile(r"/docs/([a-z]+\.md)")
_PAGE: Final = """<!doctype html>
<meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 15px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }}
table {{ border-collapse: collapse }} td, th {{ border: 1px solid #ccc; padding: 0.3em 0.6em; vertical-align: top }}
pre, code {{ background: #f4f4f4 }} pre {{ padding: 0.8em; overflow: auto }}</style>
{body}
"""


class DocumentsMiddleware:
    """An ASGI application that answers `/docs/<name>.md` and passes other requests on."""

    def __init__(self, application: Application) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        match = _PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
        page = document_page(match[1]) if match else None
        if page is None:
            await self._application(scope, receive, send)
            return
        headers = [(b"content-type", b"text/html; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": page.encode()})


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
