"""`sr-assets demo`: the whole platform on this machine, with its own servers and an emulated fleet."""

from sr_assets.embedded.demo.run import run_demo
from sr_assets.embedded.demo.servers import CITIES, configuration

__all__ = ["CITIES", "configuration", "run_demo"]
