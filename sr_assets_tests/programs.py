"""Programs that some tests need. A test without its program is skipped, but fails in CI: nobody reads a list of skips there."""

import os
import shutil
from typing import Final, NoReturn

import pytest

from sr_assets_tests.browser import find_chromium

#: Where servers are, also with a short PATH.
_FOLDERS: Final = "/usr/sbin:/usr/bin:/sbin:/bin"


def program(name: str, *, package: str) -> str:
    """Return the path of a program of a Debian package."""
    return (
        shutil.which(name)
        or shutil.which(name, path=_FOLDERS)
        or lack(f"{name} is not installed (Debian package {package})")
    )


def chromium() -> str:
    """Return the path of Chromium."""
    return find_chromium() or lack("chromium is not installed (Debian package chromium)")


def lack(problem: str) -> NoReturn:
    """Skip the test, or fail it in CI."""
    if os.environ.get("CI"):
        pytest.fail(problem)
    pytest.skip(problem)
