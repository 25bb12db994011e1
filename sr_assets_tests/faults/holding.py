"""The environment in which a process and its children can be held at a checkpoint."""

import os
from collections.abc import Mapping
from pathlib import Path

from sr_assets.adapters.crash_points import Point

HOLD_VARIABLE = "SR_ASSETS_HOLD"
_FOLDER = Path(__file__).parent / "hold"


def hold_at(point: Point | str, marker: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that hold a process at a checkpoint; both keep their entries."""
    path = os.pathsep.join(filter(None, [str(_FOLDER), environ.get("PYTHONPATH")]))
    holds = ";".join(filter(None, [f"{point}:{marker}", environ.get(HOLD_VARIABLE)]))
    return {HOLD_VARIABLE: holds, "PYTHONPATH": path}
