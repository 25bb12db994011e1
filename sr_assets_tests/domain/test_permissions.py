"""Whether granted patterns cover a needed one."""

import pytest

from sr_assets.domain.permissions import Granted


@pytest.mark.parametrize(
    ("allow", "deny", "subject", "included"),
    (
        ((), (), "a.>", True),
        (("a.>",), (), "a.b.*", True),
        (("a.*",), (), "a.>", False),
        (("a.*", "a.*.>"), (), "a.>", True),
        (("a.*", "a.*.*", "a.*.*.>"), (), "a.>", True),
        (("a.b", "a.c"), (), "a.*", False),
        (("b.>",), (), "a", False),
        ((), ("a.b.>",), "a.>", False),
        ((), ("a.b.>",), "a.c", True),
        (("a.>",), ("a.*.secret",), "a.b.open", True),
    ),
)
def test_granted_includes_covered_and_not_denied_patterns(
    allow: tuple[str, ...], deny: tuple[str, ...], subject: str, included: bool
) -> None:
    assert Granted(allow, deny).includes(subject) is included
