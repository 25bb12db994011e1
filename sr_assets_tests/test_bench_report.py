"""BENCH.md says what docs/bench.json measured."""

import json

from sr_assets.embedded.bench.__main__ import WORKLOADS
from sr_assets_tests import bench_report


def test_the_table_is_made_of_the_figures() -> None:
    found = json.loads((bench_report.FIGURES).read_text())
    assert set(found) == {"machine", *WORKLOADS}
    said = bench_report.FILE.read_text().partition(bench_report.BEGIN)[2].partition(bench_report.END)[0]
    assert said == "\n".join(bench_report.lines(found)) + "\n"
