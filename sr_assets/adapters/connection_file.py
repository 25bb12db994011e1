"""How Spark's tasks learn to reach a cluster: a file that only its owner can read, whose path may be in a plan or a log.

Where tasks run on other machines, the file is packed with those that it names, and unpacked there in memory. Not here: the
connection itself (`wire`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.private import write_private
from sr_assets.adapters.wire import Connection
from sr_assets.adapters.wire.connection import REQUEST_SECONDS
from sr_assets.domain.clusters import ChoriaSettings, ClusterSettings, TlsSettings
from sr_assets.domain.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def open_connection(
    file: str, name: str, *, abrupt: bool = False, request_seconds: float = REQUEST_SECONDS
) -> Connection:
    """Return a connection, to be entered with `with`, to the cluster described in `file`.

    With `abrupt` nothing that was not sent yet leaves this machine once it is closed, or its process has ended.
    """
    fields = json.loads(Path(file).read_text())
    tls = TlsSettings(**fields["tls"]) if fields["tls"] else None
    choria = ChoriaSettings(**fields["choria"]) if fields["choria"] else None
    known = fields | {"servers": tuple(fields["servers"]), "tls": tls, "choria": choria}
    return Connection(ClusterSettings(**known), name, request_seconds=request_seconds, abrupt=abrupt)


@dataclass(frozen=True, slots=True, repr=False)
class PackedConnection:
    """A connection file with the content of the files that it names, by their paths; it is never shown as text."""

    fields: dict[str, Any]
    files: dict[str, bytes]


def pack_connection(file: str) -> PackedConnection:
    """Read a connection file and all that it names; raises RunError naming one that cannot be read."""
    return _packed(json.loads(Path(file).read_text()))


def pack_cluster(cluster: ClusterSettings) -> PackedConnection:
    """Return a cluster as `pack_connection` does, without a file of its own."""
    return _packed(asdict(cluster))


def _packed(fields: dict[str, Any]) -> PackedConnection:
    files = {}
    for path in _named_files(fields):
        try:
            files[path] = Path(path).read_bytes()
        except OSError as error:
            raise RunError(f"{path}: cannot be read: {error.strerror}") from None
    return PackedConnection(fields, files)


@contextlib.contextmanager
def unpacked(packed: PackedConnection) -> Iterator[str]:
    """Yield the path of a connection file, for `open_connection`: it and all that it names are in memory, on no disk."""
    with contextlib.ExitStack() as stack:

        def in_memory(content: bytes) -> str:
            descriptor = os.memfd_create("connection", os.MFD_CLOEXEC)
            stack.callback(os.close, descriptor)
            os.write(descriptor, content)
            return f"/proc/self/fd/{descriptor}"

        paths = {path: in_memory(content) for path, content in packed.files.items()}
        yield in_memory(json.dumps(_renamed(packed.fields, paths)).encode())


_FILE_KEYS: Final = ("credentials", "jwt", "nkey", "ca", "cert", "key", "seed_file", "jwt_file")


def _named_files(fields: dict[str, Any]) -> list[str]:
    inner = [path for block in ("tls", "choria") for path in (_named_files(fields[block]) if fields.get(block) else [])]
    return [fields[key] for key in _FILE_KEYS if fields.get(key)] + inner


def _renamed(fields: dict[str, Any], paths: dict[str, str]) -> dict[str, Any]:
    """Return the fields with other paths in place of those of files."""

    def rename(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return _renamed(value, paths)
        return paths[value] if value and key in _FILE_KEYS else value

    return {key: rename(key, value) for key, value in fields.items()}
