"""Fetching ahead: the next item is fetched during the work on the last one; order and errors stay in place."""

import threading
from collections.abc import Iterator

import pytest

from sr_assets.adapters.copying.copier import ahead

_SECONDS = 10.0


@pytest.mark.parametrize("count", (0, 1, 2, 50))
def test_items_keep_their_order(count: int) -> None:
    assert list(ahead(iter(range(count)))) == list(range(count))


def test_next_item_is_fetched_during_the_work_on_the_last_one() -> None:
    fetched = [threading.Event() for _ in range(3)]

    def items() -> Iterator[int]:
        for number, event in enumerate(fetched):
            event.set()
            yield number

    taken = ahead(items())
    assert next(taken) == 0
    assert fetched[1].wait(_SECONDS)
    # One item ahead, not more: each may have megabytes.
    assert not fetched[2].is_set()
    assert list(taken) == [1, 2]


def test_error_follows_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield from (1, 2)
        raise OSError("lost")

    taken = ahead(items())
    assert [next(taken), next(taken)] == [1, 2]
    with pytest.raises(OSError, match="lost"):
        next(taken)


def test_end_of_the_work_waits_for_the_thread() -> None:
    begun, finish = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        yield 1
        begun.set()
        assert finish.wait(_SECONDS)
        yield 2

    taken = ahead(items())
    assert next(taken) == 1
    assert begun.wait(_SECONDS)
    threading.Timer(0.1, finish.set).start()
    taken.close()
    assert finish.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fetching")]
