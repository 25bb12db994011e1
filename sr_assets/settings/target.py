"""The blocks `target` of a stream (the differences of a new target from its source) and `placement`."""

from typing import Annotated, Literal

from sr_assets.domain.target_stream import TargetOptions
from sr_assets.settings.mapping import Block, file_key
from sr_assets.settings.values import Duration, Positive, Size, Text, choice, whole_number

Storage = Literal["file", "memory"]
#: JetStream's maximum of replicas.
Replicas = Annotated[int, whole_number(1, 5)]


class PlacementBlock(Block):
    """`placement` of a stream: the cluster and tags of its servers."""

    cluster: Text | None = file_key("the name of the servers' cluster", None)
    tags: tuple[Text, ...] = file_key("tags that each server has", [])


class TargetBlock(Block):
    """`target` of a stream."""

    storage: Annotated[Storage, choice(Storage)] | None = file_key("the storage", None)
    replicas: Replicas | None = file_key("the number of replicas", None)
    max_age: Duration | None = file_key("maximum age of a message", None)
    max_bytes: Size | None = file_key("maximum size", None)
    max_msgs: Positive | None = file_key("maximum number of messages", None)
    placement: PlacementBlock = file_key("[placement](#block-placement)", {}, default_text="none")

    @property
    def options(self) -> TargetOptions | None:
        """The options of the block, or None if it is empty."""
        options = TargetOptions(
            self.storage,
            self.replicas,
            self.max_age,
            self.max_bytes,
            self.max_msgs,
            self.placement.cluster,
            self.placement.tags,
        )
        return options if options.wanted else None
