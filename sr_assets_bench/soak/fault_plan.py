"""The kinds of faults of a soak, and the plan of the rare ones."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random

#: Seconds of a server's absence, drawn evenly between two bounds.
GONE_SECONDS: Final = (0.1, 3.0)
#: Numbers of rare faults in a soak; the shares determine how long they last and how old the restored copy is: some
#: seconds of a minute, some minutes of half an hour.
_RARE: Final = 3
_RARE_WITHIN: Final = (0.3, 0.9)
_LASTING_SHARE: Final = (0.05, 0.15)
_COPY_AGE_SHARE: Final = (0.02, 0.1)


class Fault(StrEnum):
    """The kinds of faults. Killed means SIGKILL; a killed server is started again, a stopped one continues."""

    RUN_KILLED = "run killed"
    RUN_ENDED = "run ended"
    WORKER_KILLED = "worker killed"
    ENGINE_KILLED = "engine killed"
    SOURCE_KILLED = "source killed"
    TARGET_KILLED = "target killed"
    SOURCE_STOPPED = "source stopped"
    TARGET_STOPPED = "target stopped"
    TARGET_AWAY = "target away"
    SOURCE_COPIED = "source killed and its store copied"
    SOURCE_PUT_BACK = "source put back from the copy"
    TARGET_LIMITED = "target account at its limit"
    ADVISORIES_FULL = "advisory stream full"
    STATE_LOST = "state lost and put back"
    CLOCK_AHEAD = "source's clock ahead"


#: These faults occur at planned times; the kinds of a group one after the other.
RARE_FAULTS: Final = (
    (Fault.TARGET_AWAY,),
    (Fault.SOURCE_COPIED, Fault.SOURCE_PUT_BACK),
    (Fault.TARGET_LIMITED, Fault.ADVISORIES_FULL),
    (Fault.STATE_LOST,),
    (Fault.CLOCK_AHEAD,),
)


def plan_rare_faults(chance: random.Random, seconds: float) -> list[tuple[float, Fault, float]]:
    """Draw the times of the rare faults in a soak, one of each kind after the other, and their durations."""
    drawn = []
    for number in range(_RARE):
        at = {
            fault: (number + chance.uniform(*_RARE_WITHIN)) / _RARE * seconds
            for group in RARE_FAULTS
            for fault in group
        }
        at[Fault.SOURCE_COPIED] = at[Fault.SOURCE_PUT_BACK] - chance.uniform(*_COPY_AGE_SHARE) * seconds
        for fault, seconds_after in at.items():
            long = fault not in {Fault.SOURCE_COPIED, Fault.SOURCE_PUT_BACK}
            lasting = chance.uniform(*_LASTING_SHARE) * seconds if long else chance.uniform(*GONE_SECONDS)
            drawn.append((seconds_after, fault, lasting))
    return sorted(drawn)
