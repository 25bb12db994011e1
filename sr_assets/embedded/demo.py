"""The whole platform on this machine: a NATS server for each site and one for the centre, a fleet, Dagster at work.

Here: starting and stopping all of it. Not here: what is shown meanwhile (`demo_view`), the verdict at the end
(`demo_verdict`), the processes of Dagster (`operate`), the configuration's words (`demo.yaml`).
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from dagster import DagsterInstance, DagsterRunStatus, RunsFilter
from rich.console import Console

from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.adapters.published.reading import count_rows
from sr_assets.adapters.spark.engine import Engine, abandon_start, start_engine, stop_engine
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.embedded.demo_verdict import judge
from sr_assets.embedded.demo_view import Summary, step
from sr_assets.embedded.emulator import Churn, Fleet, FleetPlan
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.operate import Services, failures, prepare_instance, run_sites, signals_as_interrupt
from sr_assets.settings import ClusterSettings, Settings, load_settings

CITIES: Final = (
    *("london", "paris", "berlin", "madrid", "rome", "vienna", "prague", "warsaw", "dublin", "lisbon"),
    *("oslo", "helsinki", "athens", "budapest", "brussels", "zagreb", "sofia", "riga", "vilnius", "tallinn"),
)
_TEMPLATE: Final = "demo.yaml"
_LOG: Final = "demo.log"
_SUBJECT: Final = "choria.stream.input.registration"
_TOLD: Final = ["choria.stream.advisories.>", "sr_assets.observer_alive.>"]
_CITY_STREAMS: Final = {"CHORIA_REGISTRATION": [f"{_SUBJECT}.>"], "CHORIA_ADVISORIES": _TOLD}
_CENTRE: Final = "centre"
_CENTRE_STREAMS: Final = {"ADVISORIES": _TOLD}
_INTERVAL_SECONDS: Final = 3.0
# Between the template's warning and interval, and beyond its interval: timeout and recover, timeout and expire.
_CHURN: Final = Churn(0.4, 12.0, 24.0)
_FIRST_TABLE_SECONDS: Final = 300.0
_RUN_END_SECONDS: Final = 120.0
_LOG_LINES: Final = 20
_UNDER_WAY: Final = [DagsterRunStatus.STARTING, DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING]


def run_demo(
    sites: int = 2,
    nodes: int = 100,
    port: int = 3000,
    home: Path | None = None,
    *,
    ui: bool = True,
    for_seconds: float | None = None,
    as_json: bool = False,
) -> int:
    """Start everything, show what happens, stop everything; returns the exit code.

    Without `for_seconds` until Ctrl-C, SIGTERM or a hang-up. With it until so long after the first published table;
    then the fleet stops, the sites are drained and the code is 1 when the verdict has something against it. `as_json`:
    stdout has nothing but the verdict. A given `home` is kept, and carried on by the next demo in it; otherwise nothing
    remains. Raises SrAssetsError.
    """
    if not 1 <= sites <= len(CITIES):
        raise ConfigurationError(f"--sites {sites}: from 1 to {len(CITIES)} are possible")
    with (
        _stdout_on_stderr() if as_json else contextlib.nullcontext(),
        signals_as_interrupt(*_signals()) as ignore_signals,
    ):
        console = Console()
        stack = contextlib.ExitStack()
        try:
            folder = stack.enter_context(_home(home))
            demo = _Demo(console, folder, CITIES[:sites], nodes, stack)
            verdict = demo.play(port, ui=ui, for_seconds=for_seconds, judged=as_json or for_seconds is not None)
        except KeyboardInterrupt:
            return 0 if for_seconds is None else 128 + signal.SIGINT
        finally:
            ignore_signals()
            with console.status("stopping ...", spinner="line"):
                stack.close()
    if verdict is None:
        return 0
    if as_json:
        sys.stdout.write(json.dumps(verdict) + "\n")
        sys.stdout.flush()
    return int(bool(verdict["failed"]))


def configuration(cities: Sequence[str], home: Path, urls: dict[str, str]) -> str:
    """Return the template's text for these cities, the last city's entries repeated for every city it does not have.

    `urls` has the server of each city and of `centre`, which stand in it then: any other command can use the file.
    """
    template = files("sr_assets.embedded").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    head, mark, rest = template.partition(f"  - name: {CITIES[1]}\n")
    rest, feeds_mark, feeds = rest.partition("\n# What the centre makes")
    entries = [
        (mark + rest).replace(CITIES[1], city).replace(CITIES[1].upper(), city.upper())
        for city in cities
        if city != CITIES[0]
    ]
    text = "\n".join([head.rstrip("\n") + "\n", *entries]) + feeds_mark + feeds
    for name, url in urls.items():
        text = text.replace(f"${{SR_DEMO_{name.upper()}_URL}}", url)
    return text.replace("${SR_DEMO_HOME}", json.dumps(str(home), ensure_ascii=False)[1:-1])


class _Demo:
    """One demo in its home; what it starts is stopped by the stack, last first."""

    def __init__(
        self, console: Console, folder: Path, cities: Sequence[str], nodes: int, stack: contextlib.ExitStack
    ) -> None:
        self._console = console
        self._folder = folder
        self._cities = cities
        self._nodes = nodes
        self._stack = stack
        self._began = datetime.now(UTC)

    def play(self, port: int, *, ui: bool, for_seconds: float | None, judged: bool) -> dict[str, Any] | None:
        """Start, watch and, when it is judged, finish; returns the verdict."""
        began, before = time.monotonic(), self._publication()
        try:
            with step(self._console, f"NATS servers of {', '.join(self._cities)} and the centre"):
                settings = self._start_servers()
            fleets = [self._start_fleet(place, settings) for place in range(len(self._cities))]
            engine = self._start_engine(settings)
            with step(self._console, "Dagster"):
                logged = replace(settings, logfile=self._folder / _LOG)
                services = self._stack.enter_context(Services(logged, port, ui=ui))
            self._say_where(services if ui else None)
            with step(self._console, "Spark"):
                engine.result()
            with step(self._console, "first run"):
                self._await_publication(before, services)
            self._console.print(f"first rows {time.monotonic() - began:.0f} s after the start", highlight=False)
        except RunError:
            self._show_log()
            raise
        watched = time.monotonic()
        try:
            self._watch(services, for_seconds)
        except KeyboardInterrupt:
            if for_seconds is not None or not judged:
                raise
        if not judged:
            return None
        return self._finish(settings, services, fleets, time.monotonic() - watched)

    def _start_servers(self) -> Settings:
        """Start the servers with their streams and write the configuration that names them."""
        servers = {
            name: self._stack.enter_context(NatsServer(self._folder / "nats" / name, name))
            for name in (*self._cities, _CENTRE)
        }
        for name, server in servers.items():
            with Cluster(ClusterSettings((server.address,)), "sr-assets demo") as cluster:
                for stream, subjects in (_CENTRE_STREAMS if name == _CENTRE else _CITY_STREAMS).items():
                    if not cluster.stream_exists(stream):
                        cluster.create_stream({"name": stream, "subjects": subjects, "allow_direct": True})
        file = self._folder / _TEMPLATE
        urls = {name: server.url for name, server in servers.items()}
        file.write_text(configuration(self._cities, self._folder, urls), encoding="utf-8")
        # For all our children; what the user has set for a platform of his own is none of the demo's business.
        os.environ["SR_ASSETS_CONFIG"] = str(file)
        for theirs in ("SR_ASSETS_HOME", "DAGSTER_HOME"):
            os.environ.pop(theirs, None)
        settings = load_settings()
        prepare_instance(settings)
        return settings

    def _start_fleet(self, place: int, settings: Settings) -> Fleet:
        city = self._cities[place]
        plan = FleetPlan(self._nodes, _INTERVAL_SECONDS, place, _CHURN, domain=f"{city}.example.net")
        server = settings.sites[city][0].source.servers[0]
        return self._stack.enter_context(Fleet(plan, f"nats://{server}", f"{_SUBJECT}.%s"))

    def _start_engine(self, settings: Settings) -> "Future[Engine]":
        """Start Spark beside Dagster: the first run finds it warm."""
        self._stack.callback(stop_engine, self._folder)
        pool = self._stack.enter_context(ThreadPoolExecutor(1))
        engine = pool.submit(start_engine, settings.spark, self._folder)
        self._stack.callback(self._abandon, engine)
        return engine

    def _abandon(self, engine: "Future[Engine]") -> None:
        """Do not wait for an engine that nobody needs any more: on a busy machine that may take minutes."""
        while not engine.done():
            abandon_start(self._folder)
            time.sleep(0.1)

    def _say_where(self, services: Services | None) -> None:
        if services is not None:
            self._console.print(f"\n    Dagster  [bold]{services.url}[/]")
        self._console.print(
            f"    Ask      export SR_ASSETS_CONFIG={self._folder / _TEMPLATE}\n"
            "             sr-assets summary, sr-assets nodes --global, sr-assets advisories --global --follow",
            highlight=False,
            soft_wrap=True,
        )
        self._console.print("    Stop     Ctrl-C\n", highlight=False)

    def _publication(self) -> tuple[int, int] | None:
        """Return what tells one published file from the next."""
        try:
            status = (self._folder / "fleet.duckdb").stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _await_publication(self, before: tuple[int, int] | None, services: Services) -> None:
        deadline = time.monotonic() + _FIRST_TABLE_SECONDS
        while self._publication() == before or not count_rows(self._folder)["last_seen_nodes"]:
            services.check()
            if time.monotonic() > deadline:
                reasons = "; ".join(self._failed_runs()) or "no run failed"
                raise RunError(f"nothing was published within {_FIRST_TABLE_SECONDS:.0f} s: {reasons}")
            time.sleep(0.1)

    def _watch(self, services: Services, for_seconds: float | None) -> None:
        """Show what is published until the time is over; without a time, until an interrupt."""
        end = None if for_seconds is None else time.monotonic() + for_seconds
        with Summary(self._console, self._folder) as summary:
            while (left := 0.5 if end is None else end - time.monotonic()) > 0:
                services.check()
                summary.refresh()
                time.sleep(min(left, 0.5))

    def _finish(
        self, settings: Settings, services: Services, fleets: Sequence[Fleet], seconds: float
    ) -> dict[str, Any]:
        """Let the runs under way end and no other begin, stop the fleet, drain everything once more, and judge.

        The fleet speaks on until the runs have ended: else they would see all of it time out. It is drained down the
        flow: what the cities announce as they end is copied then, and what is copied folded.
        """
        failed = []
        with step(self._console, "the runs under way end"):
            services.stop("daemon")
            if not _runs_ended():
                failed.append(f"a run was still under way after {_RUN_END_SECONDS:.0f} s")
        with step(self._console, "the fleet falls silent, last drain"):
            for fleet in fleets:
                fleet.stop()
            tracked = [stream for stream in settings.streams if stream.tracked]
            told = [stream for stream in settings.streams if not stream.tracked]
            codes = [run_sites(settings, part, once=True) for part in (tracked, told, settings.feeds)]
            if any(codes):
                failed.append("the last drain failed")
        verdict = judge(settings, seconds)
        verdict["failed"] = [*failed, *self._failed_runs(), *verdict["failed"]]
        for line in verdict["failed"]:
            self._console.print(f"[red]failed[/]  {line}", highlight=False)
        if verdict["failed"]:
            self._show_log()
        return verdict

    def _failed_runs(self) -> list[str]:
        with DagsterInstance.get() as instance:
            runs = instance.get_runs(RunsFilter(statuses=[DagsterRunStatus.FAILURE], created_after=self._began))
            return [
                f"run {run.run_id[:8]} of {run.job_name}: {line}"
                for run in runs
                for line in failures([log.dagster_event for log in instance.all_logs(run.run_id) if log.dagster_event])
            ]

    def _show_log(self) -> None:
        with contextlib.suppress(OSError):
            lines = (self._folder / _LOG).read_text(errors="replace").splitlines()
            self._console.print("\n".join(lines[-_LOG_LINES:]), markup=False, highlight=False)


def _runs_ended() -> bool:
    """Wait for the runs under way; they end by themselves when their budget is used."""
    deadline = time.monotonic() + _RUN_END_SECONDS
    with DagsterInstance.get() as instance:
        while instance.get_runs_count(RunsFilter(statuses=_UNDER_WAY)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.3)
    return True


def _signals() -> list[signal.Signals]:
    """Return what ends a demo: under nohup a hang-up is to be survived."""
    survived = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if survived else [signal.SIGHUP])]


@contextlib.contextmanager
def _home(chosen: Path | None) -> Iterator[Path]:
    """Yield the folder of the demo: a fresh one that is removed, or the chosen one, new or of an earlier demo, kept.

    Raises ConfigurationError when the chosen one holds something else, RunError when another demo is in it.
    """
    if chosen is None:
        folder = Path(tempfile.mkdtemp(prefix="sr-assets-demo-")).resolve()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    folder = chosen.expanduser().resolve()
    try:
        if folder.exists() and any(folder.iterdir()) and not (folder / _TEMPLATE).exists():
            raise ConfigurationError(f"--home {chosen} holds something that is no demo; name a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "demo.lock").open("a+")
    except OSError as error:
        raise ConfigurationError(f"--home {chosen} cannot be used: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"another demo runs in {chosen}; stop it, or name another --home") from None
        yield folder


@contextlib.contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """Send what we and our children write to stdout to stderr instead."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
