"""Another user of this machine: processes with another user id that listen, write files or send requests."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from sr_assets_tests.rig import PATIENCE_SECONDS

#: `nobody` on most systems; any user without rights serves.
STRANGER = 65534

#: The first line of a script that a process of root runs as that user, who may be unable to read Python's own files.
BECOME_STRANGER = f"import os, socket, sys, threading; os.setgroups([]); os.setgid({STRANGER}); os.setuid({STRANGER})\n"

_LISTEN = f"""{BECOME_STRANGER}
received = []

def serve(listening):
    while True:
        client = listening.accept()[0]
        received.append(b"connected ")
        threading.Thread(target=answer, args=(client,), daemon=True).start()

def answer(client):
    # An empty SETTINGS frame and its acknowledgement: the client of HTTP/2 sends its requests then.
    client.sendall(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)) + bytes((0, 0, 0, 4, 1, 0, 0, 0, 0)))
    while part := client.recv(65536):
        received.append(part)

for argument in sys.argv[1:]:
    host, _, port = argument.rpartition(":")
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((host, int(port)))
    listening.listen()
    threading.Thread(target=serve, args=(listening,), daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
sys.stdout.buffer.write(b"".join(received))
sys.stdout.flush()
os._exit(0)
"""


@dataclass
class Listener:
    """What a stranger's listening ports received; complete after the block."""

    received: bytes = b""


def need_root() -> None:
    """Skip the test unless it can start processes of another user."""
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")


def run_as_stranger(script: str, arguments: Sequence[str] = ()) -> str:
    """Run Python code as another user and return its output."""
    need_root()
    command = [sys.executable, "-I", "-S", "-c", BECOME_STRANGER + script, *arguments]
    return subprocess.run(command, cwd="/", check=True, capture_output=True, text=True, timeout=PATIENCE_SECONDS).stdout


@contextlib.contextmanager
def stranger_listens(*addresses: str) -> Iterator[Listener]:
    """Let another user listen on addresses (`host:port`), speak HTTP/2 there, and record what it receives."""
    need_root()
    listener = Listener()
    command = [sys.executable, "-I", "-S", "-c", _LISTEN, *addresses]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/") as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield listener
        finally:
            listener.received = process.communicate(timeout=PATIENCE_SECONDS)[0]


@contextlib.contextmanager
def connected_stranger(port: int, count: int, sent: bytes = b"") -> Iterator[None]:
    """Let another user hold connections to a port of 127.0.0.1, each after the first bytes of a request or of none."""
    need_root()
    connect = """
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = []
for _ in range(int(sys.argv[2])):
    client = socket.socket()
    client.connect(("127.0.0.1", int(sys.argv[1])))
    try:
        client.sendall(bytes.fromhex(sys.argv[3]))
    except ConnectionError:  # the server has closed it already
        pass
    held.append(client)
print("held", flush=True)
sys.stdin.read()
"""
    command = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        f"import resource; {BECOME_STRANGER}{connect}",
        str(port),
        str(count),
        sent.hex(),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield
        process.communicate(timeout=PATIENCE_SECONDS)
