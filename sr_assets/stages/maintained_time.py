"""The time that maintenance windows cover, for `availability_daily`."""

from collections.abc import Sequence

import pyarrow as pa

from sr_assets.adapters.published.node_histories import Histories
from sr_assets.adapters.state.maintenance import added_windows
from sr_assets.domain.days import Day
from sr_assets.domain.tracking.maintenance import Window, covered
from sr_assets.settings import Settings

_NODES = pa.schema([("key", pa.int32()), ("windows", pa.int32())])
_SPANS = pa.schema([("windows", pa.int32()), ("from_ns", pa.int64()), ("to_ns", pa.int64())])


def maintained_time(settings: Settings, histories: Histories, days: Sequence[Day]) -> tuple[pa.Table, pa.Table]:
    """Return the nodes that windows are about, and the disjoint covered times of consecutive days, both by `windows`.

    `windows` numbers the combinations of windows. Columns: key, windows; and windows, from_ns, to_ns.
    """
    numbers: dict[tuple[Window, ...], int] = {}
    rows = []
    for stream in settings.streams:
        windows = (*stream.windows, *added_windows(settings.home / "sites" / stream.name))
        for key, node, node_class in histories.nodes_of(stream.name, stream.stream) if windows else ():
            matching = tuple(window for window in windows if window.matches(node, node_class))
            if matching:
                rows.append({"key": key, "windows": numbers.setdefault(matching, len(numbers))})
    spans = [
        {"windows": number, "from_ns": since_ns, "to_ns": until_ns}
        for windows, number in numbers.items()
        for since_ns, until_ns in covered(windows, days[0].first_ns, days[-1].next_ns)
    ]
    return pa.Table.from_pylist(rows, _NODES), pa.Table.from_pylist(spans, _SPANS)
