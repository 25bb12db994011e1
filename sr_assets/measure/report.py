"""The report of a result, or of two side by side: one HTML file with plots, light and dark, that needs no network."""

import html
import io
import re
from collections.abc import Sequence
from typing import Any, Final

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

Result = tuple[str, dict[str, Any], Sequence[Trial]]


def render_report(results: Sequence[Result]) -> str:
    """Return the HTML of (title, suite, tests) for each result."""
    longest = max([1.0, *(max(test.times_ns, default=0) / 1e6 for _, _, tests in results for test in tests)])
    sides = "".join(_side(title, suite, tests, longest) for title, suite, tests in results)
    title = html.escape(" and ".join(name for name, _, _ in results))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Measurement: {title}</title><style>{_STYLE}</style></head>\n"
        f'<body><h1>Measurement</h1><div class="sides">{sides}</div></body></html>\n'
    )


def _side(title: str, suite: dict[str, Any], tests: Sequence[Trial], longest_ms: float) -> str:
    facts = "; ".join(f"{key}: {value}" for key, value in suite.items() if key not in ("partial", "missing", "reason"))
    head = "".join(
        f"<th>{name}</th>"
        for name in ("test", "description", "nodes", "expected", "found", "p50 ms", "p95 ms", "max ms")
    )
    rows = "".join(
        f"<tr><td>{number}</td><td>{html.escape(test.description)}</td><td>{test.nodes}</td><td>{test.expected}</td>"
        f"<td>{test.found}</td>{''.join(f'<td>{value:.1f}</td>' for value in test.percentiles_ms())}</tr>"
        for number, test in enumerate(tests, 1)
    )
    return (
        f"<section><h2>{html.escape(title)}</h2><p>{html.escape(facts)}</p>"
        f"<table><tr>{head}</tr>{rows}</table>{_plot(tests, longest_ms)}</section>"
    )


def _plot(tests: Sequence[Trial], longest_ms: float) -> str:
    """Return an SVG of the share of items found by each time, above the number of items per bucket."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6.5), layout="constrained")
    figure.patch.set_alpha(0)
    shares, counts = figure.subplots(2, 1, sharex=True)
    for number, test in enumerate(tests):
        colour, label = _LINES[number % len(_LINES)], f"test {number + 1}: {test.nodes} nodes"
        times = [0.0, *sorted(time_ns / 1e6 for time_ns in test.times_ns)]
        shares.plot(times, [100 * n / max(1, test.found) for n in range(len(times))], color=colour, label=label)
        buckets = test.buckets()
        counts.step([10 * n for n in range(len(buckets))], buckets, where="post", color=colour)
    shares.set_ylabel("found, %")
    counts.set(xlabel="ms", ylabel="items per 10 ms", xlim=(0, longest_ms))
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
