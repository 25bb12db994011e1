"""The watcher of the local Spark server: `python -m sr_assets.adapters.spark.watch FOLDER COMMAND…`.

It starts the command and ends together with the command. It ends the command in three cases: the time in `FOLDER/keep`
(seconds of the monotonic clock) has passed while the lock `FOLDER/users` was free, `FOLDER/engine.json` names another
process, or the folder was deleted. So no engine remains after the last run, or after a run that was killed while starting
one. It imports little, because it lives as long as the server.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from sr_assets.adapters import times
from sr_assets.adapters.locking import lock

_POLL_SECONDS = 5.0


def main(folder: str, command: list[str]) -> int:
    """Run the command until it ends or is no longer needed; return its exit code."""
    # The engine also serves other runs, without the resource limits of its first run.
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    process = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    while True:
        try:
            return process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if not _wanted(Path(folder)):
                # The whole group: the server's Python workers belong to it.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                os.killpg(0, signal.SIGTERM)


def _wanted(folder: Path) -> bool:
    try:
        if json.loads((folder / "engine.json").read_text())["pid"] != os.getpid():
            return False
        with (folder / "users").open("a") as users:
            if not lock(users):
                return True
        return times.monotonic() <= float((folder / "keep").read_text())
    except (OSError, ValueError, KeyError):
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
