"""Optional dependencies: which extra of the package a feature needs, and the error if it is not installed."""

from importlib.util import find_spec

from sr_assets.domain.errors import RunError


def missing_extra(feature: str, extra: str) -> str:
    """Return the line that names the extra which a feature needs."""
    return f'{feature} needs the extra "{extra}"; install sr-assets[{extra}]'


def require_extra(feature: str, extra: str, module: str) -> None:
    """Raise RunError if a module of an extra is not installed."""
    if find_spec(module) is None:
        raise RunError(missing_extra(feature, extra))
