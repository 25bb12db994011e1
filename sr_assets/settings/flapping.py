"""The block `flapping`: the number of transitions within a time with which a node flaps."""

from typing import Annotated

from sr_assets.domain.tracking.announcements import Flapping
from sr_assets.settings.mapping import Block, file_key
from sr_assets.settings.values import Duration, whole_number


class FlappingBlock(Block):
    """`flapping` of a stream."""

    transitions: Annotated[int, whole_number(2)] = file_key("a node flaps with this number of transitions", 6)
    within_ns: Duration = file_key("in this time; it settles after the same time without one", "1h", name="within")

    @property
    def rule(self) -> Flapping:
        """The rule."""
        return Flapping(self.transitions, self.within_ns)
