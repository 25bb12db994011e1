"""A PostgreSQL server for tests, if Debian's package is installed."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sr_assets_tests.programs import lack
from sr_assets_tests.rig import PATIENCE_SECONDS, wait_until

_PACKAGE = Path("/usr/lib/postgresql")


@contextmanager
def postgres() -> Iterator[str]:
    """Start a server with an empty database and yield its URL; skip the test if PostgreSQL is not installed."""
    programs = sorted(_PACKAGE.glob("*/bin/initdb")) or lack("PostgreSQL is not installed (Debian package postgresql)")
    programs_folder, user = programs[-1].parent, {}
    with tempfile.TemporaryDirectory(prefix="sr-assets-postgres-") as folder:
        if os.geteuid() == 0:
            # PostgreSQL refuses to run as root.
            owner = pwd.getpwnam("postgres")
            user = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
            shutil.chown(folder, owner.pw_uid, owner.pw_gid)
        data = Path(folder) / "data"
        quiet: dict[str, Any] = {"cwd": folder, "stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT, **user}
        subprocess.run(
            [programs_folder / "initdb", "-D", data, "-U", "dagster", "-A", "trust", "-E", "UTF8", "--no-sync"],
            check=True,
            **quiet,
        )
        options = ("-c", "listen_addresses=", "-c", "fsync=off", "-k", folder)
        server = subprocess.Popen([programs_folder / "postgres", "-D", data, *options], **quiet)
        try:
            wait_until((Path(folder) / ".s.PGSQL.5432").exists, "PostgreSQL's socket")
            wait_until(lambda: "ready" in (data / "postmaster.pid").read_text(), "PostgreSQL")
            yield f"postgresql+psycopg2://dagster@/postgres?host={folder}"
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(PATIENCE_SECONDS)
