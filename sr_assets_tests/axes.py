"""Tests that vary several things at once: the gate takes enough combinations that each pair of values occurs."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

#: What a test varies: each value by the name that it has in the test's id.
Axes = Mapping[str, Mapping[str, Any]]


def every_pair(axes: Axes) -> pytest.MarkDecorator:
    """Parametrize a test with all combinations; of three axes and more, the gate takes every second one."""
    return pytest.mark.parametrize(list(axes), combinations(axes))


def combinations(axes: Axes) -> "Sequence[Any]":
    """Return the parameters of all combinations; the marker `nightly` leaves each pair of values to the gate.

    A combination is the gate's if the places of its values add up to an even number: to any values of all axes but one, the
    last one has a value that fits.
    """
    cases = []
    for named in itertools.product(*(values.items() for values in axes.values())):
        shown, values = zip(*named, strict=True)
        places = (list(axis).index(name) for axis, name in zip(axes.values(), shown, strict=True))
        at_night = len(axes) > 2 and sum(places) % 2
        cases.append(pytest.param(*values, id="-".join(shown), marks=pytest.mark.nightly if at_night else ()))
    return cases
