"""The keys of a stream's parallel work: `workers`, and the block `partitions` with the filters of its lanes."""

from functools import cached_property
from itertools import combinations
from typing import Annotated, Final, Self

from pydantic import model_validator

from sr_assets.domain.subjects import overlaps
from sr_assets.settings.mapping import Block, file_key
from sr_assets.settings.names import Filter, read_filter
from sr_assets.settings.operators import OperatorKeys
from sr_assets.settings.values import Positive, Text, shown, whole_number

#: The lag of each lane is counted by two requests.
MAX_LANES: Final = 256
#: Replaced by the number of the partition in `filter`.
NUMBER: Final = "{p}"


class PartitionsBlock(Block):
    """`partitions` of a stream: a number of partitions and their filter, or a list of filters."""

    count: Annotated[int, whole_number(1, MAX_LANES)] | None = file_key(
        "the number of partitions", None, default_text="the number of `subjects`"
    )
    filter: Text | None = file_key("the subjects of partition `{p}`, such as `nodes.{p}.>`; `{p}` counts from 0", None)
    subjects: tuple[Filter, ...] | None = file_key("instead of `filter`: the subjects of each partition", None)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.filter is None) == (self.subjects is None):
            has = "has both filter and subjects" if self.filter is not None else "has neither filter nor subjects"
            raise ValueError(f"{has}; set count and filter, or subjects")
        if self.filter is not None:
            self._check_filter(self.filter)
        elif self.subjects is not None and not 1 <= len(self.subjects) <= MAX_LANES:
            raise ValueError(f"subjects: has {len(self.subjects)} subjects; use 1 to {MAX_LANES}")
        elif self.subjects is not None and (numbered := [each for each in self.subjects if NUMBER in each]):
            raise ValueError(
                f"subjects: {shown(numbered[0])} has {NUMBER}, which only filter replaces; use count and filter"
            )
        elif self.subjects is not None and self.count not in (None, len(self.subjects)):
            raise ValueError(
                f"count: {self.count} contradicts subjects, which has {len(self.subjects)} subjects; remove count"
            )
        for first, second in combinations(self.lanes, 2):
            if overlaps(first, second):
                key = "subjects" if self.filter is None else "filter"
                raise ValueError(
                    f"{key}: {shown(first)} and {shown(second)} overlap, so a message would be in both partitions; use"
                    " subjects that exclude each other"
                )
        return self

    def _check_filter(self, text: str) -> None:
        if self.count is None:
            raise ValueError(f"filter: {shown(text)} needs count, the number of partitions")
        if NUMBER not in text:
            raise ValueError(
                f"filter: {shown(text)} lacks {NUMBER}, the number of the partition; use for example nodes.{NUMBER}.>"
            )
        try:
            read_filter(text.replace(NUMBER, "0"))
        except ValueError as error:
            raise ValueError(f"filter: {error}") from None

    @property
    def lanes(self) -> tuple[str, ...]:
        """The filter of each partition, in order."""
        if self.subjects is not None:
            return self.subjects
        return tuple(str(self.filter).replace(NUMBER, str(number)) for number in range(self.count or 0))


class ParallelKeys(OperatorKeys):
    """The keys of a stream about parallel reading and writing."""

    partitions: PartitionsBlock | None = file_key(
        "[lanes](#block-partitions) that read and copy the stream in parallel", None, default_text="none"
    )
    workers: Positive = file_key("parallel writers", 1)

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """The filter of each partition, or nothing without `partitions`."""
        return self.partitions.lanes if self.partitions else ()

    @property
    def writers(self) -> int:
        """The number of parallel writers: `workers`, or one for each partition."""
        return len(self.lanes) or self.workers
