"""A soak of less than a minute: random faults lose, duplicate and leave behind nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sr_assets_bench.comparison.tables import Kind
from sr_assets_bench.soak.fault_plan import Fault


@pytest.mark.timeout(600)
def test_soak_loses_and_duplicates_nothing(tmp_path: Path) -> None:
    # A minimum of messages, because the number within a given time depends on the machine.
    min_messages = 4_000
    command = [
        sys.executable,
        "-m",
        "sr_assets_bench.soak",
        "--seconds",
        "30",
        "--messages",
        str(min_messages),
        "--seed",
        "1",
    ]
    completed = subprocess.run(
        [*command, "--json"], env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr
    counts = json.loads(completed.stdout)
    assert {kind: counts[kind] for kind in Kind if kind is not Kind.DISORDERED} == dict.fromkeys(
        set(Kind) - {Kind.DISORDERED}, 0
    )
    assert counts["complaints"] == 0
    assert counts["messages"] >= min_messages
    assert counts["copies"] > 500
    assert set(counts["transitions"]) == {"new", "timeout", "recover", "expire"}
    assert len(counts["faults"]) >= len(Fault) // 3, counts["faults"]
    assert {Fault.TARGET_AWAY, Fault.SOURCE_COPIED} <= counts["faults"].keys()
    assert list(tmp_path.iterdir()) == []
