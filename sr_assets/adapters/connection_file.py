"""Connection settings for Spark tasks, in a file that only its owner can read; its path may appear in plans and logs.

For tasks on other machines, the file is packed with the files that it names, and unpacked there in memory.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from sr_assets.adapters.private import remove_files, write_private
from sr_assets.adapters.wire import Connection
from sr_assets.adapters.wire.connection import REQUEST_SECONDS, VANISHED_MS
from sr_assets.domain.clusters import ChoriaSettings, ClusterSettings, TlsSettings
from sr_assets.domain.errors import RunError

#: The folder of a site's connection files, in the site's own.
CONNECTIONS: Final = "connections"
_FILE_KEYS: Final = ("credentials", "jwt", "nkey", "ca", "cert", "key", "seed_file", "jwt_file")


def write_connection(file: Path, cluster: ClusterSettings) -> Path:
    """Write a cluster's connection settings, password included, to `file`, and return it for the option `connection`.

    Spark's plans and logs contain the options of a data source, so these hold a path and no password. The file holds only
    the paths of certificates, keys and credential files. Threads may write the same file concurrently.
    """
    text = json.dumps(asdict(cluster))
    if not file.exists() or file.read_text() != text:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_private(file, text, durable=False)
    return file


def remove_connections(folder: Path) -> None:
    """Remove the connection files of a site's folder."""
    remove_files(folder / CONNECTIONS, "*.json", ".*.json.*")


def open_connection(
    file: str,
    name: str,
    *,
    abrupt: bool = False,
    request_seconds: float = REQUEST_SECONDS,
    vanished_ms: int | None = None,
) -> Connection:
    """Return a connection, to be opened by `with`, to the cluster described in `file`.

    With `abrupt`, unsent bytes are dropped when the connection is closed or the process ends, and after `vanished_ms` if the
    server does not acknowledge them.
    """
    vanished_ms = min(VANISHED_MS, vanished_ms or VANISHED_MS)
    return Connection(
        _read_cluster(file), name, request_seconds=request_seconds, abrupt=abrupt, vanished_ms=vanished_ms
    )


def _read_cluster(file: str) -> ClusterSettings:
    fields = json.loads(Path(file).read_text())
    tls = TlsSettings(**fields["tls"]) if fields["tls"] else None
    choria = ChoriaSettings(**fields["choria"]) if fields["choria"] else None
    return ClusterSettings(**fields | {"servers": tuple(fields["servers"]), "tls": tls, "choria": choria})


@dataclass(frozen=True, slots=True, repr=False)
class PackedConnection:
    """A connection file with the content of the files that it names, by path; it has no repr, which would show secrets."""

    fields: dict[str, Any]
    files: dict[str, bytes]


def pack_connection(file: str) -> PackedConnection:
    """Read a connection file and the files that it names; raises RunError that names an unreadable one."""
    return pack_cluster(_read_cluster(file))


def pack_cluster(cluster: ClusterSettings) -> PackedConnection:
    """Pack a cluster like `pack_connection`, without a connection file."""
    fields = asdict(cluster)
    files = {}
    for path in _named_files(fields):
        try:
            files[path] = Path(path).read_bytes()
        except OSError as error:
            raise RunError(f"{path}: cannot be read: {error.strerror}") from None
    return PackedConnection(fields, files)


@contextlib.contextmanager
def unpacked(packed: PackedConnection) -> Iterator[str]:
    """Yield the path of an unpacked connection file for `open_connection`; all files are in memory, never on disk."""
    with contextlib.ExitStack() as stack:

        def in_memory(content: bytes) -> str:
            descriptor = os.memfd_create("connection", os.MFD_CLOEXEC)
            stack.callback(os.close, descriptor)
            os.write(descriptor, content)
            return f"/proc/self/fd/{descriptor}"

        paths = {path: in_memory(content) for path, content in packed.files.items()}
        yield in_memory(json.dumps(_renamed(packed.fields, paths)).encode())


def _named_files(fields: dict[str, Any]) -> list[str]:
    inner = [path for block in ("tls", "choria") for path in (_named_files(fields[block]) if fields.get(block) else [])]
    return [fields[key] for key in _FILE_KEYS if fields.get(key)] + inner


def _renamed(fields: dict[str, Any], paths: dict[str, str]) -> dict[str, Any]:
    """Return the fields with replaced file paths."""

    def rename(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return _renamed(value, paths)
        return paths[value] if value and key in _FILE_KEYS else value

    return {key: rename(key, value) for key, value in fields.items()}
