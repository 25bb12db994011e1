"""The lease of a site's folder, and the guard of its work."""

from pathlib import Path

import pytest

from sr_assets.adapters.state.lease import Lease, guard_of
from sr_assets.domain.errors import LeadershipLostError


@pytest.mark.parametrize(
    ("lease", "reason"),
    (
        (Lease(leader="us", locks="ops/job", deadline=0.001), "not renewed in time"),
        (Lease(leader="them", locks="ops/job"), "them holds ops/job"),
    ),
)
def test_guard_never_names_the_loser_as_the_holder(tmp_path: Path, lease: Lease, reason: str) -> None:
    folder = tmp_path / "LONDON" / "locks"
    folder.mkdir(parents=True)
    lease.write(folder)
    with pytest.raises(LeadershipLostError, match=rf"^LONDON: the run lost its lock \({reason}\) and stops"):
        guard_of(folder)()
