"""The commands `measure` and `compare`: exact results, their files, refusals."""

import csv
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.domain.errors import RunError
from sr_assets.measure.results import REQUESTS, ResultFolder, Trial
from sr_assets.settings import parse_cluster
from sr_assets_tests.forks import Forked
from sr_assets_tests.rig import Command, wait_until
from sr_assets_tests.servers import NatsServer


def rows(file: Path) -> list[list[str]]:
    """Return the rows of a CSV file."""
    with file.open(newline="") as opened:
        return list(csv.reader(opened))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server with an emulated fleet of 30 nodes that answer."""
    with NatsServer(tmp_path_factory.mktemp("nats"), "rpc") as server:
        with Cluster(parse_cluster(server.url)) as admin:
            admin.create_stream({"name": "REG", "subjects": ["REG.>"]})
        options = ["--url", server.url, "--subject", "REG.%s", "--nodes", "30", "--interval", "1s", "--rpc"]
        with Forked([sys.executable, "-m", "sr_assets", "emulate", *options]) as child:
            with Cluster(parse_cluster(server.url)) as admin:
                wait_until(lambda: admin.stream_info("REG").messages >= 30, "a registration of each node")
            yield server
            child.send_signal(signal.SIGINT)


def measure(command: Command, server: NatsServer, out: Path, *options: str) -> tuple[int, str, str]:
    """Run `measure rpc`."""
    return command(
        "measure", "rpc", "--url", server.url, "--out", str(out), "--for", "400ms", "--interval", "200ms", *options
    )


@pytest.mark.process
def test_rpc_result_agrees_with_its_times(fleet: NatsServer, command: Command, tmp_path: Path) -> None:
    code, output, errors = measure(command, fleet, tmp_path / "out", "--nodes", "10,30", "--bytes", "2000")
    assert (code, errors) == (0, "")
    assert output.startswith("10 nodes: 20 of 20, p50 ")
    header, *tests = rows(tmp_path / "out" / "requests.csv")
    assert header == list(REQUESTS)
    assert [row[:7] for row in tests] == [
        ["1", "request → all replies", "10", "20", "20", "0", "0"],
        ["2", "request → all replies", "30", "60", "60", "0", "0"],
    ]
    times = [list(map(int, row)) for row in rows(tmp_path / "out" / "times.csv")]
    buckets = [list(map(int, row)) for row in rows(tmp_path / "out" / "time_buckets.csv")]
    for row, found_ns, counts in zip(tests, times, buckets, strict=True):
        assert list(map(float, row[7:])) == pytest.approx(np.percentile(found_ns, (50, 95, 100)) / 1e6)
        assert counts == np.bincount(np.array(found_ns) // 10_000_000).tolist()
    report = (tmp_path / "out" / "report.html").read_text()
    assert report.count("<svg") == 1
    assert "prefers-color-scheme: dark" in report
    assert "<script" not in report
    assert not any(word in report for word in (' src="http', "url(http", "@import"))
    assert json.loads((tmp_path / "out" / "suite.json").read_text())["partial"] is False


@pytest.mark.process
def test_measure_lists_missing_nodes_without_a_result(fleet: NatsServer, command: Command, tmp_path: Path) -> None:
    code, output, errors = measure(command, fleet, tmp_path / "out", "--nodes", "10,33")
    assert (code, output, errors.count("\n")) == (1, "", 1)
    assert "found 30 of 33 nodes" in errors
    assert "missing: web7.example.net, app7.example.net, sql7.example.net; start them" in errors
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "suite.json",
        "requests.partial.csv",
        "times.partial.csv",
        "time_buckets.partial.csv",
    }
    suite = json.loads((tmp_path / "out" / "suite.json").read_text())
    assert suite["partial"] is True
    assert suite["missing"] == ["web7.example.net", "app7.example.net", "sql7.example.net"]


@pytest.mark.process
def test_compare_shows_two_results(fleet: NatsServer, command: Command, tmp_path: Path) -> None:
    for name, size in (("a", "10"), ("b", "5000")):
        assert measure(command, fleet, tmp_path / name, "--nodes", "30", "--bytes", size)[0] == 0
    both = tmp_path / "both.html"
    code, output, _ = command("compare", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(both), "--format", "json")
    assert code == 0
    (row,) = json.loads(output)
    sides = [rows(tmp_path / name / "requests.csv")[1] for name in ("a", "b")]
    assert [row["max_ms_first"], row["max_ms_second"]] == [float(side[-1]) for side in sides]
    assert both.read_text().count("<svg") == 2


def test_existing_directory_is_refused(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    code, _, errors = command("measure", "rpc", "--url", "nats://127.0.0.1:1", "--nodes", "1", "--out", str(tmp_path))
    assert (code, errors) == (2, f"error: --out {tmp_path}: already exists; name a new directory\n")


def test_compare_refuses_partial_results(command: Command, tmp_path: Path) -> None:
    code, _, errors = command(
        "measure", "rpc", "--url", "nats://127.0.0.1:1", "--nodes", "1", "--out", str(tmp_path / "a")
    )
    assert (code, errors.count("\n")) == (1, 1)
    code, _, errors = command("compare", str(tmp_path / "a"), str(tmp_path))
    assert (code, errors) == (1, f"error: {tmp_path / 'a'}: the result is partial; measure again\n")
    assert command("compare", str(tmp_path), str(tmp_path))[0] == 1


@pytest.mark.parametrize("wrong", ({"times_ns": [5]}, {"failed": 1}, {"unexpected": 1}))
def test_inexact_test_gives_no_result(tmp_path: Path, wrong: dict[str, int]) -> None:
    test = Trial("replies", 2, 2, **{"times_ns": [5, 6], **wrong})  # type: ignore[arg-type]
    with pytest.raises(Exception, match="no result"), ResultFolder(tmp_path / "out", {}) as results:  # noqa: PT012  two steps
        results.tests.append(test)
        results.complete(lambda: "page")
    assert not (tmp_path / "out" / "report.html").exists()


def test_refusal_names_missing_and_unexpected_items(tmp_path: Path) -> None:
    test = Trial("copied", 2, 7, [5], missing=[f"web{n}" for n in range(6)], unexpected=1, extra=["app1 copied twice"])
    text = "found 1 of 7, 0 failed, 1 unexpected; missing: web0, .*, web4 and 1 more; unexpected: app1 copied twice; no"
    with pytest.raises(RunError, match=text), ResultFolder(tmp_path / "out", {}) as results:  # noqa: PT012  two steps
        results.tests.append(test)
        results.complete(lambda: "page")
    suite = json.loads((tmp_path / "out" / "suite.json").read_text())
    assert (suite["missing"], suite["unexpected"]) == (test.missing, ["app1 copied twice"])


def test_interruption_leaves_a_partial_result(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), ResultFolder(tmp_path / "out", {"suite": "rpc"}):
        raise KeyboardInterrupt
    suite = json.loads((tmp_path / "out" / "suite.json").read_text())
    assert (suite["partial"], suite["reason"]) == (True, "interrupted")
