"""Notifications about nodes and streams by webhook, command or mail, independent of runs and of Prometheus.

`delivery` finds published events that are not sent yet and schedules attempts, `content` formats them, `targets` makes one
attempt to send.
"""

from sr_assets.operate.notify.delivery import begin_notifying, notify_beside, notify_once

__all__ = ["begin_notifying", "notify_beside", "notify_once"]
