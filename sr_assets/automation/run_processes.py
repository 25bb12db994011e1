"""How the code server starts the processes of runs: as copies of one process, which has imported what a run needs."""

import multiprocessing
import os
import sys
import tempfile
from multiprocessing import context
from typing import Final

#: A socket's address has at most 107 bytes (unix(7)); the fork server's has up to 35 below the temporary folder.
LONGEST_FOLDER: Final = 107 - 35
#: The arguments of Dagster's command `dagster api grpc`, which is a code server.
_CODE_SERVER: Final = ["api", "grpc"]


def share_run_imports() -> None:
    """Make a code server start runs from multiprocessing's fork server, which imports the modules of a run once.

    Dagster's code server asks for "spawn", a new interpreter for each run, and has no setting for another method. The
    imports took 1.5 CPU seconds of each run. The first run starts the server. Python 3.11.0 stays with "spawn": any local
    user can command its fork server (CVE-2022-42919).
    """
    short = len(os.fsencode(tempfile.gettempdir())) <= LONGEST_FOLDER
    able = sys.platform == "linux" and sys.version_info >= (3, 11, 1) and short
    if able and sys.argv[1:3] == _CODE_SERVER:
        context.SpawnContext.Process = context.ForkServerProcess  # type: ignore[assignment]
        multiprocessing.set_forkserver_preload(["sr_assets.automation.fork_server"])
