"""The marker `process`: only tests with it can start processes, and `make test-fast` skips them."""

import subprocess
import sys

import pytest

from sr_assets_tests.rig import Rig


def test_a_test_without_the_marker_cannot_start_a_process() -> None:
    with pytest.raises(AssertionError, match=r"mark it with pytest\.mark\.process"):
        subprocess.run([sys.executable, "-c", ""], check=True)


@pytest.mark.process
def test_a_test_with_the_marker_can() -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)


def test_asking_for_a_server_or_for_spark_gives_the_marker(request: pytest.FixtureRequest, rig: Rig) -> None:
    assert request.node.get_closest_marker("process") is not None
