"""The kernel's TCP sockets: which user of this machine is at the other end of a connection, or listens.

Linux names one socket in microseconds (sock_diag(7)). For its tables of all sockets it walks through a hash table of the
machine's size, which takes milliseconds: they are read if it names none.
"""

import ipaddress
import re
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

_TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED: Final = 1
_LISTENING: Final = 10
#: No user: the client's end of the connection is closed, or nobody listens.
NOBODY: Final = -1
#: Constants of netlink(7) and sock_diag(7); the states and the cookie stand for any.
_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_NLM_F_REQUEST: Final = 1
_ANY: Final = 0xFFFFFFFF


class _End(NamedTuple):
    """One end of a connection; an IPv4 address that is written as `::ffff:…` is one of IPv4."""

    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int


class _Socket(NamedTuple):
    """What the kernel tells about a socket."""

    state: int
    user: int
    inode: int


def peer_user(client: tuple[str, int] | None, server: tuple[str, int] | None) -> int | None:
    """Return the user who owns the client's end of a connection on this machine.

    None if the system does not reveal it. NOBODY if that end is closed: the kernel lists it under root.
    """
    if client is None or server is None:
        return NOBODY
    local, remote = _end(*client), _end(*server)
    # The client's row has its address first.
    rows = (f"{first} {second}" for first, second in zip(_texts(local), _texts(remote), strict=False))
    return _owner(_named(local, remote) or _listed(rows), _ESTABLISHED)


def listener_user(host: str, port: int) -> int | None:
    """Return the user who listens on exactly this address of this machine.

    None if the system does not reveal it. NOBODY without such a listener.
    """
    local = _end(host, port)
    none = _End(type(local.address)(0), 0)
    return _owner(_named(local, none) or _listed(f"{text} 0+:0000" for text in _texts(local)), _LISTENING)


def _owner(sockets: list[_Socket] | None, wanted_state: int) -> int | None:
    """Return the one user of sockets with this state, None without an answer."""
    if sockets is None:
        return None
    owners = {each.user if each.state == wanted_state and each.inode else NOBODY for each in sockets}
    return owners.pop() if len(owners) == 1 else NOBODY


def _named(local: _End, remote: _End) -> list[_Socket]:
    """Return the socket with these addresses as the kernel would look it up for a packet; none if it does not answer."""
    family = socket.AF_INET if local.address.version == 4 else socket.AF_INET6
    request = (
        struct.pack("=BBxxI", family, socket.IPPROTO_TCP, _ANY)
        + struct.pack("!HH16s16s", local.port, remote.port, local.address.packed, remote.address.packed)
        + struct.pack("=III", 0, _ANY, _ANY)
    )
    header = struct.pack("=IHHII", 16 + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
            kernel.setblocking(False)  # it answers before `sendto` returns
            kernel.sendto(header + request, (0, 0))
            answer = kernel.recv(4096)
    except (OSError, AttributeError):  # not Linux, or a sandbox
        return []
    (kind,) = struct.unpack_from("=4xH", answer)
    if kind != _SOCK_DIAG_BY_FAMILY:
        return []
    family, state, port, address = struct.unpack_from("!16xBB2xH2x16s", answer)
    user, inode = struct.unpack_from("=80xII", answer)
    own = _end(str(ipaddress.ip_address(address[:4] if family == socket.AF_INET else address)), port)
    # A listener on all addresses receives what no other one does.
    return [_Socket(state, user, inode)] if own == local else []


def _listed(rows: Iterable[str]) -> list[_Socket] | None:
    """Return the sockets in the kernel's tables whose addresses match one of these patterns; None without a table."""
    tables = [table for table in _TABLES if table.exists()]
    row = re.compile(rf" (?:{'|'.join(rows)}) (?P<rest>.*)")
    sockets = []
    for table in tables:
        for match in row.finditer(table.read_text()):
            state, _, _, _, user, _, inode, *_ = match["rest"].split()
            sockets.append(_Socket(int(state, 16), int(user), int(inode)))
    return sockets if tables else None


def _end(host: str, port: int) -> _End:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return _End(mapped or address, port)


def _texts(end: _End) -> Iterator[str]:
    """Yield an address in the format of each table: every four bytes as a number in native byte order.

    The table of IPv6 lists an IPv4 address as `::ffff:…`.
    """
    address = end.address
    for form in (address, *([ipaddress.ip_address(f"::ffff:{address}")] if address.version == 4 else [])):
        numbers = struct.unpack(f"={len(form.packed) // 4}I", form.packed)
        yield f"{''.join(f'{number:08X}' for number in numbers)}:{end.port:04X}"
