"""Set the clock of sr-assets off: with this folder in PYTHONPATH, in every Python process.

`SR_ASSETS_SOAK_CLOCK` is the error in seconds. Python imports this module at startup. Only the time of day is wrong, as
on a host with a wrong clock; and only for modules of `sr_assets`, because libraries compare it with times of C code.
"""  # noqa: INP001  Python finds it by its name in a folder, not in a package

import os
import sys
import time

_ERROR_NS = int(os.environ.get("SR_ASSETS_SOAK_CLOCK", "0")) * 10**9
_right_ns, _right = time.time_ns, time.time


def _error_ns() -> int:
    caller = sys._getframe(2).f_globals.get("__name__", "")  # noqa: SLF001  the public way reads every frame
    return _ERROR_NS if caller.startswith("sr_assets.") else 0


if _ERROR_NS:
    time.time_ns = lambda: _right_ns() + _error_ns()
    time.time = lambda: _right() + _error_ns() / 1e9
