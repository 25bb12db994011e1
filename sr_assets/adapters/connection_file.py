"""How Spark's tasks learn to reach a cluster: a file that only its owner can read, whose path may be in a plan or a log.

Not here: the connection itself (`wire`).
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Final

from sr_assets.adapters.private import write_private
from sr_assets.adapters.wire import Connection
from sr_assets.domain.clusters import ChoriaSettings, ClusterSettings, TlsSettings

#: The folder of a site's connection files, in the site's own.
CONNECTIONS: Final = "connections"


def write_connection(file: Path, cluster: ClusterSettings) -> Path:
    """Write a cluster's connection settings, password included, to `file`; returns it for the option `connection`.

    Options of a data source are part of Spark's plans and logs: a path may be there, a password may not. Of
    certificates, keys and credential files only the paths are written. Threads may write the same file at once (a site's
    lanes do).
    """
    text = json.dumps(asdict(cluster))
    if not file.exists() or file.read_text() != text:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_private(file, text)
    return file


def remove_connections(folder: Path) -> None:
    """Remove the connection files of a site's folder."""
    shutil.rmtree(folder / CONNECTIONS, ignore_errors=True)


def open_connection(file: str, name: str) -> Connection:
    """Return a connection, to be entered with `with`, to the cluster described in `file`."""
    fields = json.loads(Path(file).read_text())
    tls = TlsSettings(**fields["tls"]) if fields["tls"] else None
    choria = ChoriaSettings(**fields["choria"]) if fields["choria"] else None
    known = fields | {"servers": tuple(fields["servers"]), "tls": tls, "choria": choria}
    return Connection(ClusterSettings(**known), name)
