"""A bare Debian system in a directory: commands in it, and programs as systemd would start them.

Every command has its own mount and process namespaces, which the kernel removes with the command. So no mount and no
process outlives a test.
"""

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from sr_assets_tests.rig import wait_until

#: Debian 12 is the oldest distribution with Python 3.11.
_SUITE = "bookworm"
MIRROR = "http://deb.debian.org/debian"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SHELL = 'mount -t proc proc "$0/proc" && cd "$0" && exec chroot . /usr/bin/env -i "$@"'
#: ProtectSystem=strict, PrivateTmp=, and a container with a read-only root and one volume, look like this to a program.
_READ_ONLY = """
set -e
root=$0 user=$1 writable=$2
shift 2
mount --bind "$root" "$root"
for folder in $writable; do mount --bind "$root$folder" "$root$folder"; done
mount -o remount,bind,ro "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/tmp"
mount -t tmpfs tmpfs "$root/dev/shm"
cd "$root"
exec chroot --userspec="$user" . /usr/bin/env -i "$@"
"""
_UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c")


def missing() -> str | None:
    """Return the reason why no chroot can be made here, or None."""
    if os.geteuid() != 0:
        return "needs root"
    tools = [tool for tool in ("debootstrap", "dpkg-deb", "unshare") if shutil.which(tool) is None]
    return f"needs {', '.join(tools)}" if tools else None


def bootstrap(root: Path) -> str | None:
    """Install a minimal Debian; return the last line of debootstrap if it fails."""
    command = ["debootstrap", "--variant=minbase", _SUITE, str(root), MIRROR]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        return (made.stdout.splitlines() or ["debootstrap failed"])[-1]
    (root / "dev" / "shm").mkdir(parents=True, exist_ok=True)
    # The system need not survive a power failure.
    (root / "etc" / "dpkg" / "dpkg.cfg.d" / "unsafe-io").write_text("force-unsafe-io\n")
    return None


@dataclass(frozen=True)
class Chroot:
    """A Debian system in a directory."""

    root: Path

    def run(self, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a command as root and return its result."""
        variables = [f"{name}={value}" for name, value in ({"PATH": _PATH, **environ}).items()]
        whole = [*_UNSHARE, _SHELL, str(self.root), "DEBIAN_FRONTEND=noninteractive", *variables, *command]
        return subprocess.run(whole, capture_output=True, text=True, check=False)

    def succeed(self, *command: str, **environ: str) -> str:
        """Run a command as root and return its output; a failure fails the test."""
        done = self.run(*command, **environ)
        assert done.returncode == 0, f"{shlex.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def path(self, inside: str) -> Path:
        """Return the path of a file of the system."""
        return self.root / inside.removeprefix("/")


@dataclass
class Service:
    """A program in a chroot with a read-only root, as a systemd unit or a container starts it.

    `writable` are the directories that it may change. `user` is the chroot's `user:group`.
    """

    chroot: Chroot
    command: list[str]
    environ: dict[str, str]
    writable: list[str]
    user: str = "sr-assets:sr-assets"
    folder: str = "/"

    def run(self) -> subprocess.CompletedProcess[str]:
        """Run the program until it ends and return its result."""
        # The first process of the namespace: the others end with it.
        limited = self._command("timeout", "--signal=KILL", "300")
        return subprocess.run(limited, capture_output=True, text=True, check=False)

    @contextlib.contextmanager
    def started(self, log: Path) -> Iterator[psutil.Process]:
        """Start the program, yield its process, and kill it and its children at the end if it still runs."""
        with log.open("wb") as output, subprocess.Popen(self._command(), stdout=output, stderr=output) as outer:
            process = _child(outer.pid)
            try:
                yield process
            finally:
                # The kernel then kills the namespace with all its processes. --kill-child does not: a change of the user
                # clears that wish.
                if process.is_running():
                    process.kill()

    def _command(self, *before: str) -> list[str]:
        variables = [f"{name}={value}" for name, value in self.environ.items()]
        mounts = [str(self.chroot.root), self.user, " ".join(self.writable)]
        return [*_UNSHARE, _READ_ONLY, *mounts, f"--chdir={self.folder}", *variables, *before, *self.command]


def _child(pid: int) -> psutil.Process:
    """Return the first process of the namespace: `unshare` itself ignores signals."""
    outer = psutil.Process(pid)
    wait_until(lambda: bool(outer.children()), "the program to start")
    return outer.children()[0]


@contextlib.contextmanager
def notifications(path: Path) -> Iterator[socket.socket]:
    """Yield a socket that receives what a program reports to systemd."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))
        path.chmod(0o777)
        try:
            yield receiver
        finally:
            path.unlink()


def unit_service(chroot: Chroot, unit: str) -> Service:
    """Return the program of an installed unit, with the user, environment and directories that systemd would give it."""
    keys: dict[str, list[str]] = {}
    text = chroot.path(f"/usr/lib/systemd/system/{unit}").read_text()
    for line in text.replace("%t", "/run").replace("%N", unit.removesuffix(".service")).splitlines():
        key, separator, value = line.partition("=")
        if separator:
            keys.setdefault(key, []).append(value)
    environ = dict(value.split("=", 1) for value in keys["Environment"])
    for file in keys["EnvironmentFile"]:
        with contextlib.suppress(FileNotFoundError):
            lines = chroot.path(file.removeprefix("-")).read_text().splitlines()
            environ |= dict(line.split("=", 1) for line in lines)
    places = {"StateDirectory": "/var/lib", "LogsDirectory": "/var/log", "RuntimeDirectory": "/run"}
    state, logs, runtime = (f"{place}/{keys[key][0]}" for key, place in places.items())
    user, group = keys["User"][0], keys["Group"][0]
    # A package installs the other folders.
    chroot.succeed("install", "-d", "-o", user, "-g", group, "-m", "0700", runtime)
    return Service(
        chroot,
        shlex.split(keys["ExecStart"][0]),
        {"PATH": "/usr/sbin:/usr/bin", "STATE_DIRECTORY": state, "LOGS_DIRECTORY": logs, **environ},
        [state, logs, runtime],
        f"{user}:{group}",
        keys["WorkingDirectory"][0],
    )
