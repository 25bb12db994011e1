"""The lanes of a partitioned stream: which one takes a message, and the error about a message that none takes."""

from collections.abc import Callable, Iterable, Sequence

from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import Message
from sr_assets.domain.subjects import matcher, printable


def lane_check(stream: str, lanes: Sequence[str]) -> Callable[[Iterable[Message]], None]:
    """Return a function that raises RunError if no lane takes one of a source's messages; without lanes it does nothing."""
    takes = matcher(lanes)

    def check(messages: Iterable[Message]) -> None:
        for message in messages:
            if not takes(message.subject):
                raise omitted_error(stream, message)

    return check if lanes else lambda _: None


def lane_finder(lanes: Sequence[str]) -> Callable[[str], int | None]:
    """Return a function that returns the number of the lane of a subject, or None."""
    takers = [matcher([lane]) for lane in lanes]
    return lambda subject: next((number for number, takes in enumerate(takers) if takes(subject)), None)


def omitted_error(stream: str, message: Message) -> RunError:
    """Return the error about a message that no lane takes."""
    return RunError(
        f"source stream {stream} holds message {message.sequence} with subject {printable(message.subject)}, which no"
        " partition takes; add the subject to partitions"
    )
