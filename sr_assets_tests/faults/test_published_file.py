"""The published file under foreign access: a stopped run that holds the lock, and a shell that writes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sr_assets.adapters.crash_points import Point
from sr_assets.adapters.published import manifest
from sr_assets.adapters.published.manifest import is_published
from sr_assets.domain.errors import RunError
from sr_assets_tests.faults.holding import hold_at
from sr_assets_tests.faults.rig import await_marker
from sr_assets_tests.rig import PATIENCE_SECONDS, SITE, Rig, Sent, stop_process

_SHELL = """
import sys, duckdb
with duckdb.connect(sys.argv[1]) as shell:
    shell.execute("CREATE TABLE of_mine AS SELECT 1 AS x")
    print("open", flush=True)
    sys.stdin.readline()
"""


def two_sites(rig: Rig) -> tuple[str, str]:
    """Configure two sites with one stream each, and publish the first."""
    london, paris = rig.make(), rig.make()
    rig.add(london)
    rig.add(paris, name="PARIS")
    for stream in (london, paris):
        rig.publish(stream, [Sent(b"x")])
    rig.drain()
    return london, paris


def test_stopped_run_in_publication_blocks_others_briefly(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, paris = two_sites(rig)
    marker = tmp_path / "held"
    with monkeypatch.context() as environ:
        for variable, value in hold_at(Point.PUBLISHING_TABLES, marker).items():
            environ.setenv(variable, value)
        process = rig.start()
    holder = await_marker(process, marker)
    stop_process(holder)
    try:
        monkeypatch.setattr("sr_assets.stages.site.LOCK_SECONDS", 3.0)
        with pytest.raises(RunError, match=rf"fleet\.lock has been held by {SITE} \(pid {holder}\)") as refused:
            rig.run("PARIS")
        assert "\n" not in str(refused.value)
    finally:
        os.kill(holder, signal.SIGCONT)
        marker.write_text("released")
    assert process.communicate(timeout=PATIENCE_SECONDS)[0] == "[]\n"
    rig.drain("PARIS")
    assert {row["name"] for row in rig.rows("replication")} == {SITE, "PARIS"}
    assert manifest.LOCK_SECONDS == 30.0
    assert len(rig.copies(paris)) == 1


def test_shell_with_the_file_open_for_writing_loses_no_rows(rig: Rig) -> None:
    two_sites(rig)
    file = rig.home / "fleet.duckdb"
    shell = subprocess.Popen(
        [sys.executable, "-c", _SHELL, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert shell.stdout is not None
    try:
        assert shell.stdout.readline() == "open\n"
        rig.drain("PARIS")
        assert is_published(rig.home, SITE)
        assert {row["name"] for row in rig.rows("replication")} == {SITE, "PARIS"}
        assert not file.with_name("fleet.duckdb.wal").exists()
    finally:
        shell.communicate("\n")
    assert {row["name"] for row in rig.rows("replication")} == {SITE, "PARIS"}
    rig.drain()
    assert {row["name"] for row in rig.rows("replication")} == {SITE, "PARIS"}
