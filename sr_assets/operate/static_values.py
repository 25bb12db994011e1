"""A warning for each static value that has changed in its source since the start: a restart is due."""

import contextlib
from collections.abc import Generator, Iterator
from typing import Final

from sr_assets.adapters.logs import print_warning
from sr_assets.adapters.threads import BackgroundThread
from sr_assets.settings import Settings
from sr_assets.settings.loading import reread_static

_POLL_SECONDS: Final = 5.0


@contextlib.contextmanager
def static_values_watched(settings: Settings) -> Iterator[None]:
    """Warn in the background, once for each new value, inside the block."""
    if settings.loaded is None or not settings.loaded.static:
        yield
        return
    seen: dict[str, object] = {}

    def watch() -> Generator[float]:
        while True:
            yield _POLL_SECONDS
            warn_of_changes(settings, seen)

    with BackgroundThread("static values", watch, join_seconds=0.0):
        yield


def warn_of_changes(settings: Settings, seen: dict[str, object]) -> None:
    """Warn of each static value that differs from the start's and from `seen`, the last one read; update `seen`."""
    origins = settings.loaded.static if settings.loaded else {}
    for label, (before, now) in reread_static(settings).items():
        if now not in (before, seen.get(label, before)):
            texts = f"from {origins[label].quoted()} to {origins[label].quoted(now)}"
            print_warning(f"data {label}: changed {texts} since the start; restart to use it")
        seen[label] = now
