"""Time limits for connections whose library limits only the time between two packets."""

import contextlib
import socket
import threading
from collections.abc import Callable


def shut_after(seconds: float, current: Callable[[], socket.socket | None]) -> threading.Timer:
    """Start a timer that shuts down the socket that `current` then returns; a waiting read of it ends.

    The timer can be cancelled, and does not delay the end of the process.
    """

    def shut() -> None:
        with contextlib.suppress(OSError):
            if (sock := current()) is not None:
                sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, shut)
    timer.daemon = True
    timer.start()
    return timer
