"""A fleet of emulated Choria daemons: one connection per node, subscriptions, registration, replies, reconnects."""

from sr_assets.embedded.daemons.daemon_fleet import DaemonFleet, describe
from sr_assets.embedded.daemons.job import Job, check_needs

__all__ = ["DaemonFleet", "Job", "check_needs", "describe"]
