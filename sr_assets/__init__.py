"""Copy streams between JetStream clusters, sample and track their senders, publish advisories, query the fleet.

`read` is the public Python API. It is loaded at its first use, so that importing the package stays fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sr_assets.api import read

__all__ = ["read"]


def __getattr__(name: str) -> Any:
    if name == "read":
        from sr_assets.api import read

        return read
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
