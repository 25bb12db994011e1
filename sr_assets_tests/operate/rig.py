"""Helpers: a configuration in a folder, `sr-assets run` in a process."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sr_assets.settings import Settings, load_settings


def configure(folder: Path, monkeypatch: pytest.MonkeyPatch, entries: list[dict[str, str]]) -> Settings:
    file = folder / "replication.yaml"
    file.write_text(yaml.safe_dump({"name": "US-EAST", "state_store": str(folder / "home"), "streams": entries}))
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(file))
    for name in ("SR_ASSETS_HOME", "DAGSTER_HOME"):
        monkeypatch.delenv(name, raising=False)
    return load_settings()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sr_assets", "run", *arguments], capture_output=True, text=True, check=False
    )


def imported_from(folder: Path) -> list[str]:
    """Return which of the modules in a folder that `planted` made were imported."""
    return [trace.name for trace in folder.glob("*.imported")]
