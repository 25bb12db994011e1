"""Metrics for Prometheus, computed from the published tables and each site's status file.

Add a metric of streams to `stream_metrics`, one of a table or an election to `samples`, and its name to the reference.
`replicator` has the Stream Replicator's names. `samples` makes the text, `serving` serves it.
"""

from sr_assets.operate.metrics.samples import Exposition
from sr_assets.operate.metrics.serving import (
    MetricsServer,
    metrics_beside,
    page_url,
    serve_metrics,
    write_textfile_once,
)

__all__ = ["Exposition", "MetricsServer", "metrics_beside", "page_url", "serve_metrics", "write_textfile_once"]
