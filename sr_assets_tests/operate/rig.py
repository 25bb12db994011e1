"""Helpers: a configuration in a folder, `sr-assets run` and `sr-assets up` as processes, decoy modules."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import psutil
import pytest
import yaml

from sr_assets.adapters.state.lock import lock_owner
from sr_assets.settings import Settings, load_settings
from sr_assets_tests.forks import Forked, run_forked
from sr_assets_tests.rig import PATIENCE_SECONDS, leave_out_due_work
from sr_assets_tests.servers import free_port

T = TypeVar("T")

REPOSITORY = '{repositoryName: "__repository__", repositoryLocationName: "sr_assets.definitions"}'

#: The begin of a program that gets another signal when it begins to ignore signals.
SIGNALLED_AGAIN = """
import os, signal, sys

def handle(number, handler, real=signal.signal):
    if handler == signal.SIG_IGN:
        os.kill(os.getpid(), signal.SIGTERM)
    return real(number, handler)

signal.signal = handle
"""


def configure(folder: Path, monkeypatch: pytest.MonkeyPatch, entries: list[dict[str, str]]) -> Settings:
    file = folder / "replication.yaml"
    file.write_text(yaml.safe_dump({"name": "US-EAST", "state_store": str(folder / "home"), "streams": entries}))
    # Passwords that everybody may read are a warning.
    file.chmod(0o600)
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(file))
    for name in ("SR_ASSETS_HOME", "DAGSTER_HOME"):
        monkeypatch.delenv(name, raising=False)
    return load_settings()


def log_in_json(**top: Any) -> None:
    """Add `log_format: json` and other keys to the configuration of `configure`."""
    file = Path(os.environ["SR_ASSETS_CONFIG"])
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "log_format": "json", **top}))


def run(*arguments: str, due_work: bool = False) -> subprocess.CompletedProcess[str]:
    """Run `sr-assets run`; by default without the hourly and nightly jobs, which take longer than a site's run."""
    if not due_work:
        leave_out_due_work(load_settings().home)
    return run_forked([sys.executable, "-m", "sr_assets", "run", *arguments])


def runner_pid(home: Path, site: str) -> int:
    """Return the id of the process that runs a site, or 0."""
    owner = re.search(r"pid (\d+)", lock_owner(home / "sites" / site) or "")
    return int(owner[1]) if owner else 0


def imported_from(folder: Path) -> list[str]:
    """Return the imported modules of a folder made by `planted`."""
    return [trace.name for trace in folder.glob("*.imported")]


class Up:
    """`sr-assets up` as a process; a context manager that waits until the UI responds."""

    def __init__(self, *options: str, folder: Path | None = None, errors: Path | None = None) -> None:
        self.port = free_port()
        self.command = [sys.executable, "-m", "sr_assets", "up", "--port", str(self.port), *options]
        self._folder, self._errors = folder, errors

    def __enter__(self) -> Self:
        with (self._errors or Path(os.devnull)).open("wb") as errors:
            start = Forked if self.command[0] == sys.executable else subprocess.Popen
            self.process = start(self.command, cwd=self._folder, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == f"Dagster: http://127.0.0.1:{self.port}  (Ctrl-C stops it)\n", self.process.wait(
            PATIENCE_SECONDS
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.process.send_signal(signal.SIGTERM)
            assert self.process.wait(PATIENCE_SECONDS) == 0
        finally:
            self.process.kill()
            self.process.communicate()

    def processes(self) -> list[psutil.Process]:
        """Return the process and all its descendants."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def each(self, query: Callable[[psutil.Process], T]) -> list[T]:
        """Return the result of a query for each process that does not end meanwhile."""
        results = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                results.append(query(process))
        return results

    def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, str]:
        """Send a request; returns the response's status and text."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            with connection.getresponse() as answer:
                return answer.status, answer.read().decode()
        finally:
            connection.close()

    def ask(self, query: str, **headers: str) -> Any:
        """Send a GraphQL query like the UI and return the response's data."""
        status, text = self._post(query, **headers)
        assert status == 200, text
        return json.loads(text)["data"]

    def sensors(self, **headers: str) -> set[str] | None:
        """Return the sensors in the UI, or None if it cannot reach the code server."""
        query = f"{{ sensorsOrError(repositorySelector: {REPOSITORY}) {{ ... on Sensors {{ results {{ name }} }} }} }}"
        status, text = self._post(query, **headers)
        # Without the code server, Dagster answers with status 500 or with an error of the location.
        assert status in (200, 500), text
        results = json.loads(text)["data"]["sensorsOrError"].get("results")
        return None if results is None else {sensor["name"] for sensor in results}

    def _post(self, query: str, **headers: str) -> tuple[int, str]:
        body = json.dumps({"query": query}).encode()
        return self.send("POST", "/graphql", body, content_type="application/json", **headers)
