"""Hold a process at a checkpoint: with this folder in PYTHONPATH, the hook is installed in every Python process.

`SR_ASSETS_HOLD` is `POINT:FILE`, or several with `;`. At such a point the process writes its id to FILE, which tells the test
to act, and waits until the content of FILE changes. An existing FILE holds no process. Python imports this module at startup;
without the variable, or without `sr_assets`, it does nothing.
"""  # noqa: INP001  Python finds it by its name in a folder, not in a package

import os
from contextlib import suppress


def _install(paths: dict[str, str]) -> None:
    import time
    from pathlib import Path

    from sr_assets.adapters import crash_points

    def hold(point: crash_points.Point) -> None:
        if point not in paths or (file := Path(paths[point])).exists():
            return
        own_id = str(os.getpid())
        file.write_text(own_id)
        while file.exists() and file.read_text() == own_id:
            time.sleep(0.1)

    crash_points.hook = hold


if _holds := os.environ.get("SR_ASSETS_HOLD", ""):
    with suppress(ImportError):
        _install(dict(each.split(":", 1) for each in _holds.split(";")))
