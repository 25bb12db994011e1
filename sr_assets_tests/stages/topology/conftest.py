"""The configuration fixture of native-stream tests, which call the command line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Configure = Callable[..., Path]


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Return a function that writes a configuration with these keys and points the command to it."""

    def write(**keys: Any) -> Path:
        file = tmp_path / "replication.yaml"
        file.write_text(yaml.safe_dump({"name": "CENTRE", "state_store": str(tmp_path / "home"), **keys}))
        monkeypatch.setenv("SR_ASSETS_CONFIG", str(file))
        monkeypatch.delenv("SR_ASSETS_HOME", raising=False)
        return file

    return write
