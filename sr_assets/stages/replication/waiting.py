"""The count of the messages that wait while a plain stream is paused."""

from sr_assets.stages.replication.context import CopyContext
from sr_assets.stages.source.position import note_source


def note_waiting(context: CopyContext) -> None:
    """Count the waiting messages of a paused plain stream, and commit a changed count."""
    stream, store = context.stream, context.store
    state = None if stream.tracked else store.load_stream(stream.stream)
    if state is None or not state.has_position:
        return
    source = context.clusters.connect(stream.source).stream_info(stream.stream)
    if source.created_ns != state.created_ns:
        return
    context.clock.set(source.ts_ns)
    before = state.lag_messages, state.source_last_sequence
    note_source(state, source)
    context.report.state, context.report.lag_messages = state, state.lag_messages
    if before != (state.lag_messages, state.source_last_sequence):
        with store.transaction():
            store.save_stream(state)
