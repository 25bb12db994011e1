"""How many examples of a property the gate tries, if each opens a state or drains a site."""

from hypothesis import HealthCheck, settings


def one_in(share: int) -> settings:
    """Return settings with a share of the profile's examples: a state costs as much as a hundred calls of a pure function."""
    return settings(
        max_examples=max(settings().max_examples // share, 1),
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.function_scoped_fixture,
            HealthCheck.data_too_large,
            HealthCheck.large_base_example,
        ],
    )
