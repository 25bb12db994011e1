"""Headless Chromium for the browser test and the screenshot in `docs`."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from playwright.sync_api import HttpCredentials, Page, sync_playwright

# Root has no sandbox, tests use no network, and containers have a small /dev/shm.
_FLAGS = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--no-first-run",
)
_STEP_SECONDS = 120


def find_chromium() -> str | None:
    """Return the path of Chromium, or None if it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def open_page(
    executable: str,
    width: int = 1600,
    height: int = 900,
    flags: Sequence[str] = (),
    login: HttpCredentials | None = None,
) -> Iterator[Page]:
    """Open an empty page; each step may take two minutes, because the demo keeps the machine busy."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=[*_FLAGS, *flags])
        try:
            page = browser.new_page(viewport={"width": width, "height": height}, http_credentials=login)
            page.set_default_timeout(_STEP_SECONDS * 1000)
            yield page
        finally:
            browser.close()
