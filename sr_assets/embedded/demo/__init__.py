"""`sr-assets demo`: the whole platform on this machine, with servers and an emulated fleet of its own.

Here: the demo's configuration (`configuration`), its servers (`servers`), its folder (`home`), starting and stopping
everything (`run`), what is shown meanwhile (`view`), the result at the end (`verdict`). Not here: a server's process and the
fleet (`nats_server`, `emulator`), Dagster's processes (`operate`), the configuration's text (`demo.yaml`, beside this package).
"""

from sr_assets.embedded.demo.configuration import CITIES, configuration
from sr_assets.embedded.demo.run import run_demo

__all__ = ["CITIES", "configuration", "run_demo"]
