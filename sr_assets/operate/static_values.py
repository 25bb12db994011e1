"""A warning for each static value that has changed in its source since the start: a restart is due."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Final

from sr_assets.adapters.logs import print_warning
from sr_assets.domain.secrets import quoted
from sr_assets.settings import Settings
from sr_assets.settings.loading import changed_static

_POLL_SECONDS: Final = 5.0


@contextlib.contextmanager
def static_values_watched(settings: Settings) -> Iterator[None]:
    """Warn in the background, once for each new value, inside the block."""
    if settings.loaded is None or not settings.loaded.static:
        yield
        return
    ended = threading.Event()
    threading.Thread(target=_watch, args=(settings, ended), name="static values", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _watch(settings: Settings, ended: threading.Event) -> None:
    warned: dict[str, object] = {}
    while not ended.wait(_POLL_SECONDS):
        changed = changed_static(settings)
        for label, (before, now) in changed.items():
            if label not in warned or warned[label] != now:
                texts = f"from {quoted(label, before)} to {quoted(label, now)}"
                print_warning(f"data {label}: changed {texts} since the start; restart to use it")
        warned = {label: now for label, (_, now) in changed.items()}
