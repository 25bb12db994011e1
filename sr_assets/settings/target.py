"""The block `target` of a stream: the differences of a new target from its source."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from sr_assets.domain.target_stream import TargetOptions
from sr_assets.settings.mapping import Raw
from sr_assets.settings.values import one_of, read_duration, read_text, size_in_bytes, whole_number

_MOST_REPLICAS = 5


def read_replicas(value: object) -> int:
    """Read the number of replicas of a stream."""
    replicas = whole_number(1)(value)
    if replicas > _MOST_REPLICAS:
        raise ValueError(f"{replicas} exceed the maximum of {_MOST_REPLICAS} replicas")
    return replicas


class RawPlacement(Raw):
    """`placement` of a stream: the cluster and tags of its servers."""

    cluster: Annotated[str, BeforeValidator(read_text)] | None = None
    tags: list[Annotated[str, BeforeValidator(read_text)]] = Field(default_factory=list)


class RawTarget(Raw):
    """`target`."""

    storage: Annotated[str, BeforeValidator(one_of("file", "memory"))] | None = None
    replicas: Annotated[int, BeforeValidator(read_replicas)] | None = None
    max_age: Annotated[int, BeforeValidator(read_duration)] | None = None
    max_bytes: Annotated[int, BeforeValidator(size_in_bytes(1))] | None = None
    max_msgs: Annotated[int, BeforeValidator(whole_number(1))] | None = None
    placement: RawPlacement = RawPlacement()

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
            tuple(self.placement.tags),
        )
        return options if options.wanted else None
