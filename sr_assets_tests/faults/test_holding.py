"""A process can be held only where a test put the folder with the hook into its path."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sr_assets.adapters import checkpoints
from sr_assets.adapters.checkpoints import Point
from sr_assets_tests.faults.holding import hold_at
from sr_assets_tests.rig import wait_until

SCRIPT = "from sr_assets.adapters.checkpoints import Point, reach; reach(Point.READ); print('went on')"
ROOT = str(Path(checkpoints.__file__).parents[2])


def start(script: str, **environ: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": ROOT, **environ}
    return subprocess.Popen([sys.executable, "-c", script], env=environ, stdout=subprocess.PIPE, text=True)


def test_a_process_stands_still_at_its_point_until_it_is_released(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    with start(SCRIPT, **hold_at(Point.READ, marker, {"PYTHONPATH": ROOT})) as held:
        wait_until(lambda: marker.exists() and marker.read_text() == str(held.pid), "the process at its point")
        assert held.poll() is None
        marker.write_text("released")
        assert held.communicate(timeout=20)[0] == "went on\n"


@pytest.mark.parametrize("environ", ({}, {"SR_ASSETS_HOLD": "read:{marker}"}), ids=("plain", "with the variable"))
def test_a_process_without_the_folder_in_its_path_is_never_held(tmp_path: Path, environ: dict[str, str]) -> None:
    marker = tmp_path / "marker"
    with start(SCRIPT, **{key: text.format(marker=marker) for key, text in environ.items()}) as free:
        assert free.communicate(timeout=20)[0] == "went on\n"
    assert not marker.exists()


def test_a_process_that_cannot_import_the_package_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "sr_assets.py").write_text("raise ImportError\n")
    environ = hold_at(Point.READ, tmp_path / "marker", {"PYTHONPATH": str(tmp_path)})
    with start("print('went on')", **environ) as other:
        assert other.communicate(timeout=20)[0] == "went on\n"
