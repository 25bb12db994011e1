"""Prepares multiprocessing's fork server, which imports this module (see `run_processes.py`), for the runs that are its copies.

Import it nowhere else: it changes how the process reacts to signals.
"""

import atexit
import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
from multiprocessing import util
from typing import Final

import numpy as np

from sr_assets.dagster_internals import CODE_SERVER_RUN

#: pyarrow imports pandas for its first array of Python objects. A module that fails costs each run the time of its import,
#: nothing else.
_IMPORTED: Final = (
    "sr_assets.definitions",
    "sr_assets.stages.run",
    "pandas",
    "pyarrow.dataset",
    "pyspark.sql.connect.session",
    *CODE_SERVER_RUN,
)
#: `PR_SET_PDEATHSIG` of prctl(2).
_SIGNAL_AFTER_PARENT: Final = 1
_FORK_SERVER: Final = os.getpid()


def _begin_run() -> None:
    """Give a run, not its own children, signals and random numbers of its own."""
    if multiprocessing.parent_process():
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Dagster regards the runs of a lost fork server as failed, so they must end with it.
    ctypes.CDLL(None).prctl(_SIGNAL_AFTER_PARENT, signal.SIGTERM)
    if os.getppid() != _FORK_SERVER:
        os.kill(os.getpid(), signal.SIGTERM)
    np.random.seed()  # noqa: NPY002  users' assets may use these numbers
    util.register_after_fork(util, _exit_like_an_interpreter)


def _exit_like_an_interpreter(_: object) -> None:
    """Let this process call the functions of `atexit` at its end, which Python 3.11 and 3.12 omit."""
    util.Finalize(None, atexit._run_exitfuncs, exitpriority=0)  # noqa: SLF001


# Stopping a code server signals its whole group. The fork server, which reports how the runs end, must outlive them.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.register_at_fork(after_in_child=_begin_run)
for _name in _IMPORTED:
    # The run imports it too, and reports the error.
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
