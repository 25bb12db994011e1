"""Soaks of less than a minute: random faults lose, duplicate and leave behind nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sr_assets_bench.comparison.tables import Kind
from sr_assets_bench.soak.fault_plan import Fault

#: A minimum of messages, because the number within a given time depends on the machine.
MIN_MESSAGES = 4_000


def soak(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a soak; assert that it finds no difference and leaves no file, and return its counts."""
    command = [sys.executable, "-m", "sr_assets_bench.soak", "--seed", "1", "--json", *arguments]
    completed = subprocess.run(
        command, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr
    counts: dict[str, Any] = json.loads(completed.stdout)
    assert {kind: counts[kind] for kind in Kind if kind is not Kind.DISORDERED} == dict.fromkeys(
        set(Kind) - {Kind.DISORDERED}, 0
    )
    assert counts["complaints"] == 0
    assert list(folder.iterdir()) == []
    return counts


@pytest.mark.long
@pytest.mark.timeout(600)
def test_soak_loses_and_duplicates_nothing(tmp_path: Path) -> None:
    counts = soak(tmp_path, "--seconds", "30", "--messages", str(MIN_MESSAGES))
    assert counts["messages"] >= MIN_MESSAGES
    assert counts["copies"] > 500
    assert set(counts["transitions"]) == {"new", "timeout", "recover", "expire"}
    assert len(counts["faults"]) >= len(Fault) // 3, counts["faults"]
    assert {Fault.TARGET_AWAY, Fault.SOURCE_COPIED} <= counts["faults"].keys()
    rules = ("outages", "held", "suppressed", "flapping", "by_hand", "unretired")
    assert all(counts[rule] for rule in rules), {rule: counts[rule] for rule in rules}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_soak_of_two_members_hands_over_exactly(tmp_path: Path) -> None:
    counts = soak(tmp_path, "--members", "2", "--seconds", "20", "--fail-overs", "2")
    assert counts["fail_overs"] >= 2
    assert counts["copies"] > 100
    assert {"new", "timeout"} <= counts["transitions"].keys()
