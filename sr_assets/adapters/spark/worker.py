"""How the data source's reader and writer set up Python in Spark's workers."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector: it would scan all messages in memory repeatedly, and none is part of a cycle.

    Measured: a copy of 512 B messages takes an eighth less time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
