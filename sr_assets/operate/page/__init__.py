"""The status page: one self-contained HTML file made from the published tables, readable offline and on a phone."""

from sr_assets.operate.page.rendering import render_page, write_page
from sr_assets.operate.page.serving import PAGE_HEADERS, PAGE_PATHS, PagePublisher

__all__ = ["PAGE_HEADERS", "PAGE_PATHS", "PagePublisher", "render_page", "write_page"]
