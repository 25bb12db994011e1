"""The report of a result, or of two side by side: one HTML file with plots, light and dark, that needs no network."""

import html
import io
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from sr_assets.measure.results import Trial

#: Colours that are readable on white and on black.
_LINES: Final = ("#2f7ed8", "#d9822b", "#3a9d5d", "#b05cc6", "#c94f4f", "#7a8a99")
_GREY: Final = "#808890"
_STYLE: Final = """
:root { color-scheme: light dark; --line: #d0d5da; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid var(--line); }
td:nth-child(2), th:nth-child(2) { text-align: left; } svg { width: 100%; height: auto; }
@media (prefers-color-scheme: dark) { :root { --line: #3a4046; } body { background: #15181b; color: #dfe3e6; } }
"""

#: A plot has at most this many points of a line, and bars.
_MOST_POINTS: Final = 1_000
_MOST_SPANS: Final = 400

Result = tuple[str, dict[str, Any], Sequence[Trial]]
#: A test and its number, from 1.
Numbered = tuple[int, Trial]


def render_report(results: Sequence[Result]) -> str:
    """Return the HTML of (title, suite, tests) for each result."""
    longest: dict[str, float] = defaultdict(lambda: 1.0)
    for _, _, tests in results:
        for test in tests:
            longest[test.description] = max(longest[test.description], max(test.times_ns, default=0) / 1e6)
    sides = "".join(_side(title, suite, tests, longest) for title, suite, tests in results)
    title = html.escape(" and ".join(name for name, _, _ in results))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Measurement: {title}</title><style>{_STYLE}</style></head>\n"
        f'<body><h1>Measurement</h1><div class="sides">{sides}</div></body></html>\n'
    )


def _side(title: str, suite: dict[str, Any], tests: Sequence[Trial], longest_ms: Mapping[str, float]) -> str:
    facts = "; ".join(
        f"{key}: {value}" for key, value in suite.items() if key not in ("partial", "missing", "unexpected", "reason")
    )
    head = "".join(
        f"<th>{name}</th>"
        for name in ("test", "description", "nodes", "expected", "found", "p50 ms", "p95 ms", "max ms")
    )
    rows = "".join(
        f"<tr><td>{number}</td><td>{html.escape(test.description)}</td><td>{test.nodes}</td><td>{test.expected}</td>"
        f"<td>{test.found}</td>{''.join(f'<td>{value:.1f}</td>' for value in test.percentiles_ms())}</tr>"
        for number, test in enumerate(tests, 1)
    )
    groups: dict[str, list[Numbered]] = defaultdict(list)
    for number, test in enumerate(tests, 1):
        groups[test.description].append((number, test))
    plots = "".join(
        f"<h3>{html.escape(description)}</h3>{_plot(group, longest_ms[description])}"
        for description, group in groups.items()
    )
    return (
        f"<section><h2>{html.escape(title)}</h2><p>{html.escape(facts)}</p>"
        f"<table><tr>{head}</tr>{rows}</table>{plots}</section>"
    )


def _plot(tests: Sequence[Numbered], longest_ms: float) -> str:
    """Return an SVG of the share of items found by each time, above the number of items per bucket."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6.5), layout="constrained")
    figure.patch.set_alpha(0)
    shares, counts = figure.subplots(2, 1, sharex=True)
    # A bar for each of a limited number of equal spans keeps the page small.
    span_ms = 10 * max(1, math.ceil(longest_ms / 10 / _MOST_SPANS))
    for number, test in tests:
        colour, label = _LINES[number % len(_LINES)], f"test {number}: {test.nodes} nodes"
        times = np.sort(np.array([0, *test.times_ns]) / 1e6)
        ranks = np.unique(np.linspace(0, len(times) - 1, _MOST_POINTS, dtype=int))
        shares.plot(times[ranks], 100 * ranks / max(1, test.found), color=colour, label=label)
        edges = np.arange(0, longest_ms + 2 * span_ms, span_ms)
        counts.stairs(np.histogram(times[1:], edges)[0], edges, color=colour)
    shares.set_ylabel("found, %")
    counts.set(xlabel="ms", ylabel=f"items per {span_ms} ms", xlim=(0, longest_ms))
    shares.legend(labelcolor=_GREY, frameon=False)
    for axes in (shares, counts):
        axes.patch.set_alpha(0)
        axes.grid(visible=True, color=_GREY, alpha=0.25)
        axes.tick_params(colors=_GREY)
        axes.xaxis.label.set_color(_GREY)
        axes.yaxis.label.set_color(_GREY)
        for spine in axes.spines.values():
            spine.set_color(_GREY)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    svg = drawn.getvalue()
    # The metadata names addresses of vocabularies; a page without them needs no explanation.
    return re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
