"""The types of the keys' values: durations, sizes, numbers, choices, flags, times, paths.

A reader returns the value for Settings, or raises ValueError with the mistake and the allowed values; `document`
prepends the key. Add a type here if several blocks use it.
"""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, get_args
from zoneinfo import ZoneInfo

from pydantic import BeforeValidator

from sr_assets.domain.errors import ConfigurationError
from sr_assets.domain.positions import DAY_NS, SECOND_NS, parse_rfc3339_ns

_MINUTE_NS = 60 * SECOND_NS
_HOUR_NS = 60 * _MINUTE_NS

# A month and a year are the Stream Replicator's: 30 and 365 days.
_UNIT_NS = {
    "ms": SECOND_NS // 1000,
    "s": SECOND_NS,
    "m": _MINUTE_NS,
    "h": _HOUR_NS,
    "d": DAY_NS,
    "D": DAY_NS,
    "w": 7 * DAY_NS,
    "W": 7 * DAY_NS,
    "M": 30 * DAY_NS,
    "y": 365 * DAY_NS,
    "Y": 365 * DAY_NS,
}
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ms|[smhdDwWMyY])")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMG]i?B?|B)?", re.IGNORECASE)
_LONGEST_NS = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Value(BeforeValidator):
    """The reader of a key's value, and the value's type as the reference names it."""

    type: str = "text"


def parse_duration(text: str) -> int:
    """Read a duration such as `90s`, `12m`, `1.5d`, `1M` or a sum such as `1h30m`, in nanoseconds.

    Raises ConfigurationError for anything else, including a bare number and a negative duration.
    """
    try:
        return read_span(text)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


def shown(value: object) -> str:
    """Return a value as one line of text, shortened, and without the login of a misplaced URL."""
    text = repr(value)
    colon, end = text.find(":"), text.rfind("@")
    if 0 <= colon < end:
        # From the start of a word that may be a scheme or a user.
        start = max(text.rfind(mark, 0, colon) for mark in " '\"") + 1
        text = f"{text[:start]}***{text[end:]}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_span(value: object) -> int:
    """Read a duration, which may be zero, in nanoseconds."""
    allowed = "use a number and a unit (ms s m h d w M y) such as 90s, 12m, 1.5d, 1M, or a sum such as 1h30m"
    text = value.strip() if isinstance(value, str) else "0" if value == 0 and value is not False else ""
    if text == "0":
        return 0
    parts = _DURATION_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{shown(value)} is not a duration: {allowed}")
    total = int(sum(Fraction(number.rstrip(".")) * _UNIT_NS[unit] for number, unit in parts))
    if total > _LONGEST_NS:
        raise ValueError(f"{shown(value)} is too long; the maximum is 292 years")
    return total


def read_duration(value: object) -> int:
    """Read a duration above zero, in nanoseconds."""
    total = read_span(value)
    if total == 0:
        raise ValueError(f"{shown(value)} must be longer than zero")
    return total


def read_seconds(value: object) -> int:
    """Read plain seconds, or a duration, in nanoseconds."""
    plain = re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", str(value))
    return int(Fraction(plain[0]) * SECOND_NS) if plain else read_span(value)


def read_text(value: object) -> str:
    """Read text that fits on one line."""
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is not text; put it in quotes")  # noqa: TRY004  pydantic requires ValueError
    if not value.isprintable():
        raise ValueError(f"{shown(value)} has control characters")
    return value


def read_secret(value: object) -> str:
    """Read text that is never displayed."""
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError("is not text; put it in quotes, without control characters")
    return value


def read_flag(value: object) -> bool:
    """Read true or false; a flag from the environment is text."""
    flags = {"true": True, "false": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in flags:
        return flags[value.lower()]
    raise ValueError(f"{shown(value)} is neither true nor false")


def whole_number(smallest: int, largest: int | None = None) -> Value:
    """Return the type of a whole number in an inclusive range; a number from the environment is text."""
    most = (1 << 64) - 1 if largest is None else largest
    allowed = f"{smallest} or more" if largest is None else f"{smallest} to {largest}"

    def whole(value: object) -> int:
        number = value
        if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,20}", value):
            number = int(value)
        if not isinstance(number, int) or isinstance(number, bool) or not smallest <= number <= most:
            raise ValueError(f"{shown(value)} is not a whole number, {allowed}")
        return number

    return Value(whole, type=f"number, {allowed}")


def size_in_bytes(smallest: int, largest: int = (1 << 63) - 1) -> Value:
    """Return the type of a size from `smallest` to `largest` bytes: a plain number, or one with KiB, MB and the like."""

    def size(value: object) -> int:
        parts = None if isinstance(value, bool) else _SIZE.fullmatch(str(value).strip())
        if parts is None:
            raise ValueError(f"{shown(value)} is not a size; use bytes, or a number with KiB, MiB or GiB")
        unit = (parts[2] or "B").upper()
        step = 1024 if "I" in unit else 1000
        factor: int = step ** "BKMG".index(unit[0])
        total = math.ceil(Fraction(parts[1]) * factor)
        if total > largest:
            limit = "less than 8 EiB" if largest >= 1 << 62 else f"{largest >> 20} MiB or less"
            raise ValueError(f"{shown(value)} is too large; use {limit}")
        if total < smallest:
            raise ValueError(f"{shown(value)} must be {smallest} byte or more")
        return total

    return Value(size, type="size")


def limit(reader: Value, unlimited: int = -1) -> Value:
    """Return the type of a JetStream limit: a value of `reader`, or `unlimited`, -1 or 0, read as JetStream's number."""

    def read(value: object) -> object:
        if str(value).strip().lower() in ("unlimited", "-1", "0"):
            return unlimited
        try:
            return reader.func(value)  # type: ignore[call-arg]
        except ValueError as error:
            raise ValueError(f"{error}, or unlimited") from None

    return Value(read, type=f"{reader.type}, or `unlimited`")


def choice(literal: Any) -> Value:
    """Return the type of one of the values of a Literal, case-insensitive."""
    allowed: tuple[str, ...] = get_args(literal)

    def choose(value: object) -> str:
        if not isinstance(value, str) or value.lower() not in allowed:
            raise ValueError(f"{shown(value)} is not one of {', '.join(allowed)}")
        return value.lower()

    return Value(choose, type=", ".join(f"`{item}`" for item in allowed))


def read_time(value: object) -> int:
    """Read an RFC 3339 time, in nanoseconds since 1970."""
    text = read_text(value)
    try:
        ns = parse_rfc3339_ns(text)
    except ValueError:
        raise ValueError(f"{shown(text)} is not a time; use RFC 3339 such as 2026-01-31T12:00:00Z") from None
    if not 0 <= ns <= _LONGEST_NS:
        raise ValueError(f"{shown(text)} is out of range; use a time between 1970 and 2262")
    return ns


def read_timezone(value: object) -> str:
    """Read the name of a time zone, such as `Europe/London`."""
    text = read_text(value)
    try:
        return ZoneInfo(text).key
    except (ValueError, KeyError, OSError):
        raise ValueError(f"{shown(text)} is not a time zone; use a name such as UTC or Europe/London") from None


def read_file_mode(value: object) -> int:
    """Read a file mode as octal text; YAML makes an octal number of an unquoted 0640."""
    modes = {f"{digits}{mode:o}": mode for mode in (0o600, 0o640, 0o644) for digits in ("", "0", "0o")}
    mode = value if value in modes.values() else modes.get(str(value))
    if not isinstance(mode, int):
        raise ValueError(  # noqa: TRY004  pydantic requires ValueError
            f"{shown(value)} is not one of '0600' (owner), '0640' (owner and group), '0644' (everyone)"
        )
    return mode


def read_path(value: object) -> Path:
    """Read a path; `~` is a user's home."""
    text = read_text(value)
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"{shown(text)}: the user has no home directory") from None


def as_list(value: object) -> object:
    """Return a list, or a single value as a list."""
    return value if isinstance(value, list) else [value]


Text = Annotated[str, Value(read_text)]
Texts = Annotated[tuple[Text, ...], Value(as_list, type="text, or a list of texts")]
Secret = Annotated[str, Value(read_secret)]
Flag = Annotated[bool, Value(read_flag, type="`true`, `false`")]
Span = Annotated[int, Value(read_span, type="duration, also 0")]
Duration = Annotated[int, Value(read_duration, type="duration")]
Seconds = Annotated[int, Value(read_seconds, type="seconds, or a duration")]
Time = Annotated[int, Value(read_time, type="time")]
Natural = Annotated[int, whole_number(0)]
Positive = Annotated[int, whole_number(1)]
Port = Annotated[int, whole_number(0, 65_535)]
Size = Annotated[int, size_in_bytes(1)]
SizeLimit = Annotated[int, limit(size_in_bytes(1))]
NumberLimit = Annotated[int, limit(whole_number(1))]
DurationLimit = Annotated[int, limit(Value(read_span, type="duration"), 0)]
Timezone = Annotated[str, Value(read_timezone, type="time zone")]
FileMode = Annotated[int, Value(read_file_mode, type="`'0600'`, `'0640'`, `'0644'`")]
File = Annotated[Path, Value(read_path, type="path")]
