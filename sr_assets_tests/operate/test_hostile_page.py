"""A hostile page in the same browser as the UI of `up`."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import HttpCredentials, Page, Response, WebSocket, expect

from sr_assets.settings import Settings
from sr_assets_tests.browser import open_page
from sr_assets_tests.operate.rig import Up
from sr_assets_tests.programs import chromium

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(600)]

_PATIENCE_MS = 180_000
_SHUTDOWN = 'mutation { shutdownRepositoryLocation(repositoryLocationName: "sr_assets.definitions") { __typename } }'
#: All ways in which a page can make a browser send requests elsewhere; `open` holds the opened sockets.
_HOSTILE = """<html><body><script>
const target = TARGET, mutation = MUTATION, asked = `http://${target}/graphql?query=${encodeURIComponent(mutation)}`;
const json = {method: "POST", body: JSON.stringify({query: mutation})};
window.open_sockets = 0;
const loaded = (name, set) => new Promise(done => {
  const element = document.createElement(name);
  element.onload = element.onerror = done;
  set(element);
  document.body.append(element);
});
const posted = name => {
  const form = document.createElement("form");
  Object.assign(form, {method: "POST", enctype: "text/plain", action: asked, target: name});
  document.body.append(form);
  form.submit();
};
Promise.all([
  loaded("img", image => { image.src = asked; }),
  loaded("script", script => { script.src = asked; }),
  loaded("iframe", frame => { frame.src = `http://${target}/`; }),
  loaded("iframe", frame => { frame.name = "posted"; }).then(() => posted("posted")),
  fetch(asked, {method: "POST", mode: "no-cors"}).catch(() => 0),
  fetch(`http://${target}/graphql`, {...json, mode: "no-cors"}).catch(() => 0),
  fetch(`http://${target}/graphql`, {...json, headers: {"Content-Type": "application/json"}}).catch(() => 0),
  new Promise(done => {
    const socket = new WebSocket(`ws://${target}/graphql`, "graphql-ws");
    socket.onopen = () => { window.open_sockets += 1; done(); };
    socket.onerror = done;
  }),
]).then(() => { document.title = "done"; });
</script></body></html>"""


@contextmanager
def served(html: str) -> Iterator[int]:
    """Serve a page on loopback; yields the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(html.encode())

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def attack(page: Page, hosts: tuple[str, ...], port: int) -> list[tuple[int, str, str]]:
    """Open the hostile page under each host name; returns status, method and URL of each response of `up`."""
    answers: list[tuple[int, str, str]] = []

    def note(response: Response) -> None:
        if f":{port}/" in response.url:
            answers.append((response.status, response.request.method, response.url))

    # Ignore requests that the UI's own page sent while the browser left it.
    page.goto("about:blank")
    page.on("response", note)
    for name in hosts:
        target = f"{'evil.example' if name == 'evil.example' else '127.0.0.1'}:{port}"
        with served(_HOSTILE.replace("TARGET", json.dumps(target)).replace("MUTATION", json.dumps(_SHUTDOWN))) as own:
            page.goto(f"http://{name}:{own}/")
            expect(page).to_have_title("done", timeout=_PATIENCE_MS)
            page.wait_for_function("() => frames.posted !== undefined")
            assert page.evaluate("window.open_sockets") == 0
    page.remove_listener("response", note)
    return answers


# Without a browser, the tests of the services send what such a page sends.
@pytest.mark.nightly
def test_hostile_page_changes_nothing_while_the_ui_works(platform: Settings, tmp_path: Path) -> None:
    # With a login, which the browser adds to every request to the UI.
    file, login = tmp_path / "logins", HttpCredentials(username="me", password="secret")
    file.write_text("me:secret")
    file.chmod(0o600)
    rebinding = "--host-resolver-rules=MAP evil.example 127.0.0.1"
    with (
        Up("--auth-file", str(file), errors=tmp_path / "errors") as up,
        open_page(chromium(), flags=[rebinding], login=login) as page,
    ):
        heard: list[str | bytes] = []  # frames of the UI's own web socket

        def listen(opened: WebSocket) -> None:
            opened.on("framereceived", lambda frame: heard.append(frame))  # noqa: PLW0108  Playwright marks its handlers

        page.on("websocket", listen)
        for _ in ("before", "after"):
            page.goto(f"http://localhost:{up.port}/automation")
            expect(page.get_by_text("london_lag", exact=True).first).to_be_visible(timeout=_PATIENCE_MS)
            while not heard:
                page.wait_for_timeout(50)
            answers = attack(page, ("localhost", "127.0.0.1", "evil.example"), up.port)
            assert answers
            assert not [answer for answer in answers if answer[0] != 403]
        assert "restarting it" not in (tmp_path / "errors").read_text()
