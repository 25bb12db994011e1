"""Metrics for Prometheus: what is published and what each site's status file says, as text, as a page, as a file.

`stream` is what is known of a stream; `ours` and `replicator` are the names, each with how its samples are made of that;
`centre` are those made of published tables; `reading` gathers it all, `serving` shows it. A new metric belongs into
`ours`, with its name in the reference. Not here: the text format (`domain.exposition`), counting (`stages`).
"""

from sr_assets.operate.metrics.reading import Exposition
from sr_assets.operate.metrics.serving import (
    MetricsServer,
    metrics_beside,
    page_url,
    serve_metrics,
    write_textfile_once,
)

__all__ = ["Exposition", "MetricsServer", "metrics_beside", "page_url", "serve_metrics", "write_textfile_once"]
