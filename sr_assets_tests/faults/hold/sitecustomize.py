"""Installs a hook that holds a process at a point of its run: with this folder in PYTHONPATH, in every Python process.

`SR_ASSETS_HOLD` is `POINT:FILE`: at that point the process writes its id to FILE, which says that it may be killed now,
and waits until FILE holds something else. A FILE that is there already holds nobody. Python imports this module at its
start, so without the variable, or without `sr_assets`, nothing is imported and nothing happens.
"""  # noqa: INP001  Python finds it by its name in a folder, not in a package

import os
from contextlib import suppress


def _install(name: str, path: str) -> None:
    import time
    from pathlib import Path

    from sr_assets.adapters import checkpoints

    file = Path(path)

    def hold(point: checkpoints.Point) -> None:
        if name != point or file.exists():
            return
        ours = str(os.getpid())
        file.write_text(ours)
        while file.exists() and file.read_text() == ours:
            time.sleep(0.1)

    checkpoints.hook = hold


_point, _, _file = os.environ.get("SR_ASSETS_HOLD", "").partition(":")
if _file:
    with suppress(ImportError):
        _install(_point, _file)
