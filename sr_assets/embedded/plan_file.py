"""The plan file of a fleet: churn, silences and outages in YAML.

    churn: {share: 0.1, short: 12m, long: 1h}
    silences: [{match: 'web*', from: 10m, for: 15m}]
    outages: [{share: 0.5, from: 30m, for: 5m}]

A silent node keeps its connection; an outage closes the connections, and the nodes return with the back-off of daemons.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from sr_assets.domain.errors import ConfigurationError, did_you_mean
from sr_assets.embedded.fleet_plan import Churn, Window
from sr_assets.settings import parse_duration

_CHURN: Final = ("share", "short", "long")
_WINDOW: Final = ("match", "share", "from", "for")
_TOP: Final = ("churn", "silences", "outages")


def read_plan_file(path: Path) -> tuple[Churn | None, tuple[Window, ...]]:
    """Return the churn and the windows of a plan file; raises ConfigurationError with the key."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigurationError(f"--plan {path}: cannot be read: {reason}") from None
    top = _mapping(f"--plan {path}", tree if tree is not None else {}, _TOP)
    churn = _churn(f"--plan {path}: churn", top["churn"]) if "churn" in top else None
    windows: list[Window] = []
    for key in _TOP[1:]:
        listed = top.get(key) or []
        if not isinstance(listed, list):
            raise ConfigurationError(f"--plan {path}: {key}: {listed!r} is not a list; write one entry per window")
        windows += (
            _window(f"--plan {path}: {key}[{n}]", entry, cut=key == "outages") for n, entry in enumerate(listed)
        )
    return churn, tuple(windows)


def _churn(where: str, value: object) -> Churn:
    block = _mapping(where, value, _CHURN)
    if missing := [key for key in _CHURN if key not in block]:
        raise ConfigurationError(f"{where}: {missing[0]} is missing; set {', '.join(_CHURN)}")
    return Churn(_share(where, block["share"]), _seconds(where, block, "short"), _seconds(where, block, "long"))


def _window(where: str, value: object, *, cut: bool) -> Window:
    block = _mapping(where, value, _WINDOW)
    begin = _seconds(where, block, "from") if "from" in block else 0.0
    end = begin + _seconds(where, block, "for") if "for" in block else math.inf
    match = block.get("match", "*")
    if not isinstance(match, str) or not match:
        raise ConfigurationError(f"{where}: match: {match!r} is not a pattern; use one such as 'web*'")
    return Window(begin, end, match, _share(where, block.get("share", 1)), cut)


def _mapping(where: str, value: object, allowed: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigurationError(f"{where}: {value!r} is not a block; its keys are {', '.join(allowed)}")
    for key in value:
        if key not in allowed:
            hint = did_you_mean(str(key), allowed)
            raise ConfigurationError(f"{where}: {key!r} is not a key; {hint}use one of {', '.join(allowed)}")
    return value


def _share(where: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigurationError(f"{where}: share: {value!r} is not a share; use a number from 0 to 1")
    return float(value)


def _seconds(where: str, block: Mapping[str, Any], key: str) -> float:
    value = block[key]
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return float(value)
    try:
        return parse_duration(str(value)) / 1e9
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {key}: {error}") from None
