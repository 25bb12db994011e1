"""Durations as text."""

from typing import Final

_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))


def duration(seconds: float) -> str:
    """Return seconds in their two largest units: 1h30m, 42s, 0.250s."""
    if abs(seconds) < 10 and seconds != int(seconds):
        return f"{seconds:.3f}s"
    left = int(abs(seconds))
    parts: list[str] = []
    for length, unit in _UNITS:
        count, left = divmod(left, length)
        if count or (unit == "s" and not parts):
            parts.append(f"{count}{unit}")
    return ("-" if seconds < 0 else "") + "".join(parts[:2])
