"""NATS servers and ports of tests. Each worker of pytest has its own range of ports, which the system assigns to nobody.

A restarted server therefore finds its port free, and so does a listener that starts after its port was chosen.
"""

import contextlib
import itertools
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sr_assets.embedded import nats_server
from sr_assets.embedded.nats_server import HOST

_FIRST: Final = 20_000
_PORTS: Final = 1_000
_RANGES: Final = 12
_WORKER: Final = int(os.environ.get("PYTEST_XDIST_WORKER", "gw11").removeprefix("gw")) % _RANGES
#: Two sessions on one machine begin at different ports of the same range.
_numbers = itertools.count(os.getpid())


def free_port() -> int:
    """Return a port on which nobody listens; each call returns a different one."""
    while True:
        port = _FIRST + _PORTS * _WORKER + next(_numbers) % _PORTS
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, port))
            return port


if TYPE_CHECKING:
    NatsServer = nats_server.NatsServer
else:

    class NatsServer(nats_server.NatsServer):
        """A nats-server on a port of the worker, by default."""

        def __init__(self, home: Path, name: str, *, port: int = 0, **options: Any) -> None:
            super().__init__(home, name, port=port or free_port(), **options)
