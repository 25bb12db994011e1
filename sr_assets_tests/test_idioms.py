"""Idioms by which a test depends on the speed of the machine; each test lists all offenders."""

import ast
import functools
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent
#: Files in which a timeout is the subject, or in which nothing comes from the other side of a socket.
_SHORT_TIMEOUTS: Final = {
    "adapters/spark/test_session.py",
    "adapters/test_puppet_ca.py",
    "faults/test_targets.py",
    "operate/test_notify.py",
}
#: Ends of names of intervals: a shorter one costs time, but fails nothing.
_INTERVALS: Final = tuple(
    f"{each}_SECONDS" for each in ("CHECK", "INTERVAL", "PAUSE", "PICK_UP", "POLL", "RESEND", "TEXTFILE")
)
#: Files with tests whose subject is a limit that the product sets, and in which no success depends on it.
_SHORT_LIMITS: Final = {
    "adapters/copying/test_sending.py",
    "adapters/nats/test_cluster.py",
    "adapters/spark/test_sink.py",
    "faults/test_cluster.py",
    "faults/test_published_file.py",
    "faults/test_server_versions.py",
    "measure/test_suites.py",
    "operate/test_metrics.py",
    "operate/test_notify.py",
    "operate/test_report.py",
    "operate/test_webserver.py",
    "stages/topology/test_apply.py",
    "stages/tracking/test_retiring.py",
}
#: Files whose sockets keep their ports until the other side has used or found them closed.
_BOUND_SOCKETS: Final = {
    "adapters/nats/test_cluster.py",
    "adapters/test_connection_table.py",
    "adapters/wire/test_connection.py",
    "operate/test_services.py",
    "operate/test_ui_access.py",
    "operate/test_webserver.py",
    "stages/replication/test_target.py",
}
#: Files that make a real outage or a real pause, or poll for others.
_SLEEPERS: Final = {
    "automation/test_host_run.py",
    "embedded/test_daemons.py",
    "faults/hold/sitecustomize.py",
    "faults/test_cluster.py",
    "faults/test_outbox.py",
    "faults/test_servers.py",
    "operate/test_metrics.py",
    "operate/test_notify.py",
    "operate/test_processes.py",
    "rig.py",
    "stages/test_site.py",
    "test_end_to_end.py",
}
_CLOCKS: Final = {"monotonic", "perf_counter", "time", "time_ns", "utc_now", "now", "today"}


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Return the tests' modules by path; the packages' tests are not part of the gate."""
    files = {file.relative_to(ROOT).as_posix(): file for file in sorted(ROOT.rglob("*.py"))}
    return {name: ast.parse(file.read_text()) for name, file in files.items() if not name.startswith("packages/")}


def offenders(
    is_wrong: Callable[[ast.AST], bool],
    allowed: Collection[str] = (),
    nodes: Callable[[ast.Module], Iterator[ast.AST]] = ast.walk,
) -> list[str]:
    """Return the file and line of each node that is wrong, outside the allowed files."""
    return [
        f"{name}:{node.lineno}: {ast.unparse(node)[:80]}"  # type: ignore[attr-defined]
        for name, module in modules().items()
        if name not in allowed
        for node in nodes(module)
        if is_wrong(node)
    ]


def called(node: ast.AST) -> str:
    """Return the last part of the name that a call calls, else ""."""
    return ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def is_number(node: ast.AST, least: float = 0.0) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value >= least


def test_no_assertion_compares_elapsed_seconds() -> None:
    def is_wrong(node: ast.AST) -> bool:
        return isinstance(node, ast.Assert) and any(called(part) == "monotonic" for part in ast.walk(node.test))

    assert offenders(is_wrong, {"rig.py", "test_cli_watch.py"}) == []


def test_success_is_awaited_with_the_patience_of_all_tests() -> None:
    """`PATIENCE_SECONDS`, or a multiple of it; without a number, `wait_until` and a process wait for as long."""

    def is_wrong(node: ast.AST) -> bool:
        if not isinstance(node, ast.Call):
            return False
        limits = [keyword.value for keyword in node.keywords if keyword.arg in ("timeout", "seconds")]
        if called(node) in ("wait_until", "wait"):
            limits += node.args[2:] if called(node) == "wait_until" else node.args[:1]
        return called(node) in ("wait_until", "wait", "communicate", "urlopen", "create_connection", "run") and any(
            is_number(limit, 1.0) for limit in limits
        )

    assert offenders(is_wrong, _SHORT_TIMEOUTS) == []


def test_ports_come_from_the_range_of_the_worker() -> None:
    def is_wrong(node: ast.AST) -> bool:
        return called(node) == "bind" and any(
            isinstance(argument, ast.Tuple) and ast.unparse(argument.elts[-1]) == "0"
            for argument in node.args  # type: ignore[attr-defined]
        )

    assert offenders(is_wrong, _BOUND_SOCKETS) == []


def test_no_test_sleeps_to_synchronise() -> None:
    assert (
        offenders(lambda node: isinstance(node, ast.Attribute) and ast.unparse(node) == "time.sleep", _SLEEPERS) == []
    )


def test_success_has_the_limits_of_the_product() -> None:
    """A limit of seconds (`_ACK_SECONDS`) is patched to less than 5 s only where it is the subject."""

    def is_wrong(node: ast.AST) -> bool:
        if not isinstance(node, ast.Call) or called(node) != "setattr" or not is_number(node.args[-1]):
            return False
        name, value = ast.unparse(node.args[-2]).strip("'\""), ast.literal_eval(node.args[-1])
        return name.endswith("_SECONDS") and not name.endswith(_INTERVALS) and 0.0 < value < 5.0

    assert offenders(is_wrong, _SHORT_LIMITS) == []


def test_errors_of_threads_reach_their_test() -> None:
    """`in_background` raises them. A daemon, such as a server, may outlive its test."""

    def is_wrong(node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("threading.Thread", "Thread")
            and not any(keyword.arg == "daemon" for keyword in node.keywords)
        )

    assert offenders(is_wrong) == []


def test_no_module_reads_a_clock_when_it_is_imported() -> None:
    def at_import(module: ast.Module) -> Iterator[ast.AST]:
        for statement in module.body:
            if not isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
                yield from ast.walk(statement)

    assert offenders(lambda node: called(node) in _CLOCKS, nodes=at_import) == []
