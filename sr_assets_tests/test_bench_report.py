"""BENCH.md says what docs/bench.json measured."""

import json

from sr_assets_bench.__main__ import WORKLOADS
from sr_assets_tests import bench_report


def test_the_table_is_made_of_the_figures() -> None:
    figures = json.loads((bench_report.FIGURES).read_text())
    assert set(figures) == {"machine", *WORKLOADS}
    table = bench_report.FILE.read_text().partition(bench_report.BEGIN)[2].partition(bench_report.END)[0]
    assert table == "\n".join(bench_report.lines(figures)) + "\n"
