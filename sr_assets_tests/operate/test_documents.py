"""The documentation site, and the documents that the webserver serves behind Dagster's UI."""

import asyncio
import re
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest
from httpx import ASGITransport, AsyncClient, Response
from mkdocs.commands.build import build
from mkdocs.config import load_config

from sr_assets.operate.webserver import DocumentsMiddleware

ROOT = Path(__file__).parents[2]
NO_SITE = Path("/nonexistent")


def get(path: str, site: Path = NO_SITE) -> Response:
    """Return the response to a request, from the documents or from the application behind them."""
    application = DocumentsMiddleware(dagster, site)

    async def request() -> Response:
        async with AsyncClient(transport=ASGITransport(application), base_url="http://ui") as client:
            return await client.get(path, follow_redirects=True)

    return asyncio.run(request())


async def dagster(_scope: MutableMapping[str, Any], _receive: Any, send: Any) -> None:
    """The application behind the documents."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"Dagster"})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; the build fails on a broken link, a missing anchor, a page outside the navigation or a missing diagram."""
    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
    build(config)
    assert config.strict
    return folder


def test_a_document_is_served_as_html_with_anchors() -> None:
    page = get("/docs/rules.md").text
    assert '<h2 id="up-silent-retired">' in page
    assert "<td>" in page


@pytest.mark.parametrize("path", ("/", "/docs/missing.md", "/docs/%2e%2e/pyproject.toml", "/docs/decisions"))
def test_other_paths_reach_dagster(path: str) -> None:
    assert get(path).text == "Dagster"


def test_web_sockets_reach_dagster(site: Path) -> None:
    reached: list[str] = []

    async def application(scope: MutableMapping[str, Any], _receive: Any, _send: Any) -> None:
        reached.append(scope["type"])

    asyncio.run(DocumentsMiddleware(application, site)({"type": "websocket", "path": "/docs/rules.md"}, None, None))  # type: ignore[arg-type]
    assert reached == ["websocket"]


def test_site_is_served_in_the_place_of_the_documents(site: Path) -> None:
    rules = get("/docs/rules.md", site)
    assert rules.url.path == "/docs/rules/"
    assert 'id="up-silent-retired"' in rules.text
    assert "Watch a fleet fall silent" in get("/docs", site).text
    assert get("/docs/tutorials/watch", site).url.path == "/docs/tutorials/watch/"
    diagram = re.search(r'src="\.\./(diagrams/[^"]+)"', rules.text)
    assert diagram is not None
    assert get(f"/docs/{diagram[1]}", site).headers["content-type"] == "image/svg+xml"
    assert get("/docs/missing/", site).status_code == 404
    assert get("/docs/%2e%2e/%2e%2e/etc/passwd", site).status_code == 404
    assert get("/runs", site).text == "Dagster"


def test_pages_of_the_site_need_no_network(site: Path) -> None:
    loads = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//[^\s>]+")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 60
    assert [each for page in pages for each in loads.findall(page.read_text())] == []
