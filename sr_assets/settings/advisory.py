"""The block `advisory` of a stream."""

from typing import Annotated, Literal

from sr_assets.settings.mapping import Block, file_key
from sr_assets.settings.names import AdvisoryTemplate
from sr_assets.settings.values import Flag, choice

End = Literal["source", "target"]
Format = Literal["v2", "v1"]


class AdvisorySettings(Block):
    """`advisory` of a stream: the announcement of transitions. `reliable` None means JetStream if a stream takes it."""

    subject: AdvisoryTemplate = file_key("`%s` is the event, `%v` the node")
    reliable: Flag | None = file_key("see [rules](rules.md#an-advisory)", None, default_text="automatic")
    cluster: Annotated[End, choice(End)] = file_key("where to publish", "source")
    observer_subject: AdvisoryTemplate = file_key(
        "the subject of the site's heartbeats", "", default_text="see [rules](rules.md#the-heartbeat)"
    )
    format: Annotated[Format, choice(Format)] = file_key(
        "`v1` is the old replicator's format, without `new`; its replicator is the entry's `name`", "v2"
    )
