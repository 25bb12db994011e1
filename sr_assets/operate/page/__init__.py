"""The status page: one self-contained HTML file of what is published, for a browser without a network, also on a phone.

`rendering` makes it of the published tables and `status.html`; `serving` answers it beside the metrics. Not here: what is
asked of the tables (`adapters.published.status_queries`).
"""

from sr_assets.operate.page.rendering import render_page, write_page
from sr_assets.operate.page.serving import PAGE_HEADERS, PAGE_PATHS, PagePublisher

__all__ = ["PAGE_HEADERS", "PAGE_PATHS", "PagePublisher", "render_page", "write_page"]
