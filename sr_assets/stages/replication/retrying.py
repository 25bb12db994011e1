"""`retry-parked`: parked messages get another attempt, after the target was changed to accept them."""

from itertools import chain

from sr_assets.adapters import wire
from sr_assets.adapters.state.status_file import outdate_status
from sr_assets.domain.positions import SequenceRange, merge_ranges
from sr_assets.settings import Settings, StreamSettings
from sr_assets.stages.site import Site


def request_parked(settings: Settings, stream: StreamSettings) -> tuple[int, int]:
    """Let the next run copy the parked messages that the source still holds.

    Return their number, and the number of parked messages that the source no longer holds; those stay parked. Until the
    run, the requested messages count as copied; a message that the target refuses again is parked again.
    """
    with Site(settings, stream.name, owner="retry-parked", run_id="retry-parked") as site:
        store, log = site.state, site.state.copy_log(stream.stream)
        parked = store.parked(stream.stream)
        requested = {sequence for resend in log.resends() for sequence in _sequences(resend.covered)}
        again = [sequence for sequence in _held(stream, parked) if sequence not in requested]
        if again:
            copying = store.load_copying(stream.stream)
            copying.parked_messages -= len(again)
            copying.copied_messages += len(again)
            copying.copied_bytes += sum(parked[sequence][1] for sequence in again)
            with store.transaction():
                store.save_copying(copying)
                store.remove_parked(stream.stream, again)
                log.add_resends(merge_ranges(SequenceRange(n, n + 1) for n in again), was_copied=True)
            site.publish()
    if again:
        outdate_status(site.folder)
    return len(again), len(parked) - len(again)


def _held(stream: StreamSettings, parked: dict[int, tuple[int, int]]) -> list[int]:
    """Return the sequences at which the source holds the parked message, by its stored time."""
    if not parked:
        return []
    with wire.Connection(stream.source, "sr-assets retry-parked") as source:
        lists = wire.read_sequences(source, stream.stream, sorted(parked), direct=False)
        return [each.sequence for each in chain.from_iterable(lists) if parked[each.sequence][0] == each.stored_ns]


def _sequences(covered: SequenceRange) -> range:
    return range(covered.first, covered.next)
