"""Fixtures: two real sites, and a folder of decoy modules."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.settings import Settings, parse_cluster
from sr_assets_tests.operate.rig import configure

#: Modules that this package's processes, Dagster's and Spark's workers import.
_IMPORTED = (
    "click",
    "dagster",
    "dagster_webserver",
    "duckdb",
    "json",
    "logging",
    "numpy",
    "pyarrow",
    "pyspark",
    "yaml",
)


@pytest.fixture
def platform(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nats_pair: tuple[NatsServer, NatsServer],
    unique: Callable[[str], str],
) -> Settings:
    """Configure two sites with one empty source stream each, so that no run needs Spark."""
    source, target = nats_pair
    streams = [unique("EMPTY"), unique("EMPTY")]
    with Cluster(parse_cluster(source.url)) as cluster:
        for stream in streams:
            cluster.create_stream({"name": stream, "subjects": [f"{stream}.>"], "allow_direct": True})
    entries = [
        {"name": site, "stream": stream, "source_url": source.url, "target_url": target.url}
        for site, stream in zip(("london", "paris"), streams, strict=True)
    ]
    return configure(tmp_path, monkeypatch, entries)


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """Fill a folder with modules that record their import, and a .env with harmful variables."""
    folder = tmp_path / "planted"
    folder.mkdir()
    (folder / ".env").write_text("DAGSTER_HOME=/nowhere\n")
    for name in _IMPORTED:
        trace = folder / f"{name}.imported"
        (folder / f"{name}.py").write_text(f"open({str(trace)!r}, 'w').close()\nraise ImportError('planted')\n")
    return folder
