"""Prometheus' text format: metrics with their samples become text.

`prometheus-client` cannot write it: it ends each counter's name in `_total`. The names of the Stream Replicator's counters,
which dashboards and alert rules use, do not end so. Not here: which metrics there are (`operate.metrics`).
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES: Final = {"\\": "\\\\", "\n": "\\n", '"': '\\"'}

MetricKind = Literal["counter", "gauge", "summary"]


class Sample(NamedTuple):
    """A value with its labels, as `labels` returns them; `suffix` is appended to the metric's name."""

    labels: str
    value: float
    suffix: str = ""


def labels(**values: str) -> str:
    """Return labels as the text format has them; a value may be any text."""
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in values.items())


@lru_cache(maxsize=65_536)
def _escaped(text: str) -> str:
    return re.sub(r'[\\\n"]', lambda match: _ESCAPES[match[0]], text)


def expose(name: str, kind: MetricKind, text: str, samples: Iterable[Sample]) -> Iterator[str]:
    """Yield the lines of a metric; none when it has no sample. What is no finite number is left out."""
    begun = False
    for written, value, suffix in samples:
        if not math.isfinite(value):
            continue
        if not begun:
            begun = True
            yield f"# HELP {name} {text}"
            yield f"# TYPE {name} {kind}"
        number = int(value) if value == int(value) else value
        yield f"{name}{suffix}{{{written}}} {number}" if written else f"{name}{suffix} {number}"
