"""Dashboards and alert rules against a real Prometheus that scrapes a real endpoint.

Tests that need Prometheus or promtool are skipped if it is not installed.
"""

import json
import math
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sr_assets.operate.metrics import Exposition
from sr_assets.operate.metrics.serving import MetricsServer
from sr_assets_tests.exposed import advance_counters, expose_everything
from sr_assets_tests.programs import program
from sr_assets_tests.rig import PATIENCE_SECONDS, wait_until
from sr_assets_tests.servers import free_port

CONF = Path(__file__).parent.parent.parent / "conf"
RULES = CONF / "prometheus" / "alerts.yaml"
DASHBOARDS = sorted((CONF / "grafana").glob("*.json"))
#: Exposed metrics that no dashboard uses, with the reason.
UNUSED = {
    "choria_stream_replicator_replicator_meta_parse_failed_count": "always 0",
    "choria_stream_replicator_replicator_ack_failed_count": "always 0",
    "choria_stream_replicator_replicator_stream_lag_messages": "these show sr_assets_lag_messages",
    "sr_assets_partition_next_sequence": "the position of the stream",
    "sr_assets_partition_watermark_age_seconds": "the age of the stream's watermark",
}
_METRIC = re.compile(r"\b(?:sr_assets|choria_stream_replicator)_[a-z_]+")
_SUFFIX = re.compile(r"(processing_time_seconds)_(sum|count)$")
_P = "choria_stream_replicator_"
_OF = '{stream=~".*",replicator=~".*"}'
#: Queries of the Stream Replicator's own dashboards.
REPLICATORS_QUERIES = (
    f"sum by (stream) ({_P}replicator_stream_lag_messages{_OF})",
    *(f"sum(increase({_P}replicator_{name}_messages{_OF}[5m]))" for name in ("total", "copied", "too_old")),
    f"sum(increase({_P}replicator_total_bytes{_OF}[5m]))",
    f"sum(increase({_P}replicator_total_bytes{_OF}[5m])) - sum(increase({_P}replicator_skipped_bytes{_OF}[5m]))",
    f"sum(rate({_P}replicator_copied_messages{_OF}[5m]))",
    f"sum(rate({_P}replicator_copied_bytes{_OF}[5m]))",
    f"sum(rate({_P}replicator_skipped_messages{_OF}[5m])) / sum(rate({_P}replicator_total_messages{_OF}[5m])) * 100",
    f"sum by (advisory) (increase({_P}advisor_total_messages{_OF}[5m]))",
    "/".join(f"rate({_P}replicator_processing_time_seconds_{part}{_OF}[5m])" for part in ("sum", "count")),
    f"sum(rate({_P}replicator_total_messages{_OF}[5m]))",
    f"sum(rate({_P}replicator_total_bytes{_OF}[5m]))",
    f"sum by (stream) ({_P}tracker_total_items{_OF})",
    f"sum(increase({_P}replicator_handler_error_count[5m])) + sum(increase({_P}replicator_ack_failed_count[5m]))",
    f"sum(increase({_P}replicator_meta_parse_failed_count[5m]))",
    f"sum(increase({_P}replicator_consumer_recreated[5m]))",
    f"sum(increase({_P}advisor_publish_errors[5m]))",
    # First generation:
    *(
        f"sum(rate(stream_replicator_{verb}_{noun}[1m]))"
        for verb in ("received", "copied")
        for noun in ("msgs", "bytes")
    ),
    "rate(stream_replicator_processing_time_sum[1m]) / rate(stream_replicator_processing_time_count[1m])",
    *(f"sum(rate(stream_replicator_limiter_memory_{outcome}[1m]))" for outcome in ("passed", "skipped")),
    "sum(stream_replicator_limiter_memory_seen)",
)


class Prometheus:
    """Client of a running Prometheus."""

    def __init__(self, url: str) -> None:
        self._url = url

    def request(self, path: str, **arguments: str) -> Any:
        """Return the data of a response; an error of Prometheus fails the test with its text."""
        request = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            pytest.fail(f"{arguments}: {error.read().decode()}")

    def values(self, query: str) -> list[float]:
        """Return the current values of a query."""
        return [float(series["value"][1]) for series in self.request("query", query=query)["result"]]


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the panels of a dashboard that have queries."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries() -> list[tuple[str, str]]:
    """Return every panel's queries, each with the titles of dashboard and panel."""
    return [
        (f"{file.stem}: {panel['title']}", target["expr"])
        for file in DASHBOARDS
        for panel in panels(json.loads(file.read_text()))
        for target in panel["targets"]
    ]


def templates() -> list[tuple[str, str]]:
    """Return the queries of all template variables, except data sources."""
    return [
        (f"{file.stem}: {variable['name']}", variable["definition"])
        for file in DASHBOARDS
        for variable in json.loads(file.read_text())["templating"]["list"]
        if variable["type"] == "query"
    ]


def rules() -> list[tuple[str, str]]:
    """Return the name and the expression of each alert rule."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]


def metrics_in(*texts: str) -> set[str]:
    """Return the metrics in these queries."""
    return {_SUFFIX.sub(r"\1", name) for text in texts for name in _METRIC.findall(text)}


def chosen(query: str) -> str:
    """Return a query with all template values selected; for a single site, the first one."""
    return (
        query.replace('="$name"', '="london"')
        .replace("$__range", "1h")
        .replace("$name", ".*")
        .replace("$stream", ".*")
        .replace("$replicator", ".*")
    )


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Exposition]:
    """Return a home in which every metric has samples, and its exposition with legacy names."""
    home = tmp_path_factory.mktemp("exposed")
    exposition = Exposition(expose_everything(home, metrics={"legacy": True}))
    exposition.renew()
    return home, exposition


@pytest.fixture(scope="module")
def prometheus(exposed: tuple[Path, Exposition], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Run a Prometheus that has scraped the home three times with different numbers."""
    server = program("prometheus", package="prometheus")
    home, exposition = exposed
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    with MetricsServer(exposition, "127.0.0.1", 0) as url:
        scrape = {"job_name": "sr-assets", "static_configs": [{"targets": [urllib.parse.urlsplit(url).netloc]}]}
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [scrape],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        process = subprocess.Popen(
            [
                server,
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            running = Prometheus(f"http://127.0.0.1:{port}")
            for step in (1, 2, 3):
                advance_counters(home, step)
                _await_scrape(running, port, 100.0 * step)
            yield running
        finally:
            process.kill()
            process.wait()


def _await_scrape(running: Prometheus, port: int, messages: float) -> None:
    total = f"max({_P}replicator_total_messages)"
    wait_until(lambda: _answers(port) and running.values(total) == [messages], "a scrape")


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=PATIENCE_SECONDS):
            return True
    except OSError:
        return False


def test_dashboards_and_alerts_use_exactly_the_exposed_metrics(exposed: tuple[Path, Exposition]) -> None:
    names = {line.split()[2] for line in exposed[1].text().splitlines() if line.startswith("# TYPE")}
    current = {name for name in names if not name.startswith("stream_replicator_")}
    used = metrics_in(*(expr for _, expr in (*queries(), *templates())))
    assert used | metrics_in(*(expr for _, expr in rules())) <= current
    assert current - used == set(UNUSED)
    assert current >= metrics_in(*REPLICATORS_QUERIES)


def test_dashboards_have_unique_ids_and_no_overlapping_panels() -> None:
    boards = [json.loads(file.read_text()) for file in DASHBOARDS]

    assert len({board["uid"] for board in boards}) == len({board["title"] for board in boards}) == 3
    for board in boards:
        cells = [
            (grid["x"] + right, grid["y"] + down)
            for panel in board["panels"]
            for grid in [panel["gridPos"]]
            for right in range(grid["w"])
            for down in range(grid["h"])
        ]
        assert len(cells) == len(set(cells))
        assert max(x for x, _ in cells) < 24
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.process
def test_dashboard_queries_return_finite_values(prometheus: Prometheus) -> None:
    for place, query in queries():
        values = prometheus.values(chosen(query))
        assert values, f"{place}: nothing for {query}"
        assert all(math.isfinite(value) for value in values), f"{place}: {values} for {query}"
    for place, definition in templates():
        match = re.fullmatch(r"label_values\((.*), (\w+)\)", definition)
        assert match, f"{place}: {definition}"
        assert prometheus.request(f"label/{match[2]}/values", **{"match[]": chosen(match[1])}), place


@pytest.mark.process
def test_stream_replicator_dashboard_queries_return_finite_values(prometheus: Prometheus) -> None:
    for query in REPLICATORS_QUERIES:
        values = prometheus.values(query)
        assert values, f"nothing for {query}"
        assert all(math.isfinite(value) for value in values), f"{values} for {query}"
    for label in ("replicator", "stream"):
        assert prometheus.request(f"label/{label}/values", **{"match[]": f"{_P}replicator_total_messages"})


@pytest.mark.process
def test_prometheus_evaluates_every_alert_rule(prometheus: Prometheus) -> None:
    def evaluated() -> bool:
        groups = prometheus.request("rules")["groups"]
        loaded = [rule for group in groups for rule in group["rules"]]
        assert not [rule["lastError"] for rule in loaded if rule.get("lastError")]
        return [rule["name"] for rule in loaded if rule["health"] == "ok"] == [name for name, _ in rules()]

    wait_until(evaluated, "the rules")


@pytest.mark.process
def test_promtool_unit_tests_of_the_alerts_pass() -> None:
    promtool, tests = program("promtool", package="prometheus"), RULES.with_name("alerts-test.yaml")
    tested = subprocess.run(
        [promtool, "test", "rules", tests.name], cwd=tests.parent, capture_output=True, text=True, check=False
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr
    named = tests.read_text()
    patterns = re.findall(r'alertname=~?"([^"]+)"', named)
    assert not [name for name, _ in rules() if not any(re.fullmatch(pattern, name) for pattern in patterns)]
