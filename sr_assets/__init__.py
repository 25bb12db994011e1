"""Copy streams between JetStream clusters, sample and track their senders, publish advisories, query the fleet.

`read` and `data` are the public Python API. They are loaded at their first use, so that importing the package stays fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sr_assets.api import data, read

__all__ = ["data", "read"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from sr_assets import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
