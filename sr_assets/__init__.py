"""Copy streams between JetStream clusters, sample and track their senders, publish advisories, query the fleet.

The names of `__all__` are the public Python API. They are loaded at their first use, so that importing the package stays fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sr_assets.api import connect, data, read, tables
    from sr_assets.component import SrAssetsComponent, build_definitions
    from sr_assets.resources import fleet_tables_io_manager

__all__ = [
    "SrAssetsComponent",
    "build_definitions",
    "connect",
    "data",
    "fleet_tables_io_manager",
    "read",
    "tables",
]


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:
    if name in ("connect", "data", "read", "tables"):
        from sr_assets import api

        return getattr(api, name)
    if name in ("SrAssetsComponent", "build_definitions"):
        from sr_assets import component

        return getattr(component, name)
    if name == "fleet_tables_io_manager":
        from sr_assets import resources

        return resources.fleet_tables_io_manager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
