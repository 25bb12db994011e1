"""Prometheus' text format.

`prometheus-client` appends `_total` to each counter's name, which the Stream Replicator's counters, dashboards and
alert rules do not have.
"""

import math
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final, Literal, NamedTuple

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES: Final = {"\\": "\\\\", "\n": "\\n", '"': '\\"'}

MetricKind = Literal["counter", "gauge", "summary"]


class Sample(NamedTuple):
    """A value with its labels, as returned by `labels`; `suffix` is appended to the metric's name."""

    labels: str
    value: float
    suffix: str = ""


def labels(**values: str) -> str:
    """Return labels in the text format; a value may be any text."""
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in values.items())


@lru_cache(maxsize=65_536)
def _escaped(text: str) -> str:
    return re.sub(r'[\\\n"]', lambda match: _ESCAPES[match[0]], text)


def expose(name: str, kind: MetricKind, text: str, samples: Iterable[Sample]) -> Iterator[str]:
    """Yield the lines of a metric, or none without samples; NaN and infinity are omitted."""
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
