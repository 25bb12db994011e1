"""The blocks `target` of a stream (the differences of a new target from its source) and `placement`."""

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from sr_assets.domain.target_stream import TargetOptions, shown_setting
from sr_assets.domain.topology.wanted import OUR_NAMES
from sr_assets.settings.mapping import Block, file_key
from sr_assets.settings.names import Filter
from sr_assets.settings.values import (
    Duration,
    DurationLimit,
    Flag,
    NumberLimit,
    SizeLimit,
    Text,
    choice,
    whole_number,
)

Storage = Literal["file", "memory"]
Retention = Literal["limits", "interest", "workqueue"]
Discard = Literal["old", "new"]
Compression = Literal["none", "s2"]
#: JetStream's names of settings that differ from ours.
JETSTREAM_NAMES: Final = {ours: theirs for theirs, ours in OUR_NAMES.items()}
#: JetStream's maximum of replicas.
Replicas = Annotated[int, whole_number(1, 5)]


class PlacementBlock(Block):
    """`placement` of a stream: the cluster and tags of its servers."""

    cluster: Text | None = file_key("the name of the servers' cluster", None)
    tags: tuple[Text, ...] = file_key("tags that each server has", [])


class TargetBlock(Block):
    """`target` of a stream: settings of a new target that differ from its source's."""

    subjects: Annotated[tuple[Filter, ...], Field(min_length=1)] | None = file_key(
        "its subjects, which must include those of the copies", None
    )
    storage: Annotated[Storage, choice(Storage)] | None = file_key("the storage", None)
    retention: Annotated[Retention, choice(Retention)] | None = file_key(
        "the retention policy; without `limits`, consumers delete copies",
        None,
        default_text="limits",
    )
    replicas: Replicas | None = file_key("the number of replicas", None)
    max_age: DurationLimit | None = file_key("maximum age of a message", None)
    max_bytes: SizeLimit | None = file_key("maximum size", None)
    max_msgs: NumberLimit | None = file_key("maximum number of messages", None)
    max_msgs_per_subject: NumberLimit | None = file_key("maximum number of messages of a subject", None)
    max_msg_size: SizeLimit | None = file_key(
        "maximum size of a message with its headers", None, default_text="unlimited"
    )
    discard: Annotated[Discard, choice(Discard)] | None = file_key("the messages that a full stream discards", None)
    duplicate_window: Duration | None = file_key(
        "the duration of the detection of duplicates", None, default_text="the source's, at least 2 minutes"
    )
    compression: Annotated[Compression, choice(Compression)] | None = file_key(
        "the compression", None, default_text="none"
    )
    allow_direct: Flag | None = file_key("whether replicas serve messages", None, default_text="true")
    deny_delete: Flag | None = file_key("whether the server refuses to delete messages", None, default_text="false")
    deny_purge: Flag | None = file_key("whether the server refuses to purge the stream", None, default_text="false")
    placement: PlacementBlock = file_key("[placement](#block-placement)", {}, default_text="none")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        window_ns, age_ns = self.duplicate_window, self.max_age
        if window_ns and age_ns and window_ns > age_ns:
            raise ValueError(
                f"duplicate_window {shown_setting('duplicate_window', window_ns)} is longer than max_age"
                f" {shown_setting('max_age', age_ns)}; use at most max_age"
            )
        return self

    @property
    def options(self) -> TargetOptions | None:
        """The settings of the block, or None if it is empty."""
        settings = {name: getattr(self, name) for name in self.keys().values() if name != "placement"}
        placement = {"cluster": self.placement.cluster, "tags": list(self.placement.tags)}
        settings["placement"] = {key: value for key, value in placement.items() if value} or None
        configured = [(JETSTREAM_NAMES.get(key, key), value) for key, value in settings.items() if value is not None]
        return TargetOptions(tuple(configured)) if configured else None
