"""Notifications without Prometheus: what happened to nodes and streams goes to a webhook, a command or by mail.

`events` is what is published and not sent yet, `messages` what is said of it, `targets` one attempt to send it, `delivery`
what follows from an attempt. A run neither waits for any of this nor knows of it. Not here: advisories, which are published
to NATS (`stages.tracking`).
"""

from sr_assets.operate.notify.delivery import begin_notifying, notify_beside, notify_once

__all__ = ["begin_notifying", "notify_beside", "notify_once"]
