"""The kernel's tables of TCP sockets: which user of this machine is at the other end of a connection, or listens."""

import ipaddress
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED: Final = "01"
_LISTENING: Final = "0A"
#: No user: the client's end of the connection is closed, or nobody listens.
NOBODY: Final = -1


def peer_user(client: tuple[str, int] | None, server: tuple[str, int] | None) -> int | None:
    """Return the user who owns the client's end of a connection on this machine.

    None if the system does not reveal it. NOBODY if that end is closed: the kernel lists it under root.
    """
    if client is None or server is None:
        return NOBODY
    # The client's row has its address first.
    rows = (f"{local} {remote}" for local, remote in zip(_texts(*client), _texts(*server), strict=False))
    return _owner(rows, _ESTABLISHED)


def listener_user(host: str, port: int) -> int | None:
    """Return the user who listens on exactly this address of this machine.

    None if the system does not reveal it. NOBODY without such a listener.
    """
    return _owner((f"{local} 0+:0000" for local in _texts(host, port)), _LISTENING)


def _owner(rows: Iterator[str], wanted_state: str) -> int | None:
    """Return the one user whose sockets have these addresses and this state."""
    tables = [table for table in _TABLES if table.exists()]
    row = re.compile(rf" (?:{'|'.join(rows)}) (?P<rest>.*)")
    owners = set()
    for table in tables:
        for match in row.finditer(table.read_text()):
            state, _, _, _, user, _, inode, *_ = match["rest"].split()
            owners.add(int(user) if state == wanted_state and inode != "0" else NOBODY)
    if len(owners) == 1:
        return owners.pop()
    return NOBODY if tables else None


def _texts(host: str, port: int) -> Iterator[str]:
    """Yield an address in the format of each table: every four bytes as a number in native byte order.

    The table of IPv6 lists an IPv4 address as `::ffff:…`.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    address = mapped or address
    for form in (address, *([ipaddress.ip_address(f"::ffff:{address}")] if address.version == 4 else [])):
        numbers = struct.unpack(f"={len(form.packed) // 4}I", form.packed)
        yield f"{''.join(f'{number:08X}' for number in numbers)}:{port:04X}"
