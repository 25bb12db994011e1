"""The documents that the webserver serves behind Dagster's UI."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from sr_assets.operate.webserver import DocumentsMiddleware


def get(path: str, kind: str = "http") -> str:
    """Return the body of the response to a request, from the documents or from the application behind them."""
    bodies: list[bytes] = []

    async def application(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        await send({"type": "http.response.body", "body": b"Dagster"})

    async def send(message: MutableMapping[str, Any]) -> None:
        bodies.append(message.get("body", b""))

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError

    asyncio.run(DocumentsMiddleware(application)({"type": kind, "path": path}, receive, send))
    return b"".join(bodies).decode()


def test_a_document_is_served_as_html_with_anchors() -> None:
    page = get("/docs/rules.md")
    assert '<h2 id="an-advisory">' in page
    assert "<td>" in page


@pytest.mark.parametrize("path", ("/", "/docs/missing.md", "/docs/../pyproject.toml", "/docs/decisions"))
def test_other_paths_reach_dagster(path: str) -> None:
    assert get(path) == "Dagster"


def test_web_sockets_reach_dagster() -> None:
    assert get("/docs/rules.md", "websocket") == "Dagster"
