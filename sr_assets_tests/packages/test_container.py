"""The Containerfile without an image builder: its commands in a bare Debian, in the place of its base images.

`make dist` builds the wheel before.
"""

import json
import os
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sr_assets_tests.packages.chroot import Chroot, Service
from sr_assets_tests.packages.conftest import copy_of
from sr_assets_tests.packages.replicating import assert_replicates
from sr_assets_tests.rig import Rig

ROOT = Path(__file__).parent.parent.parent
_CA = "/etc/ssl/certs/ca-certificates.crt"

pytestmark = [pytest.mark.process, pytest.mark.timeout(1800)]


@dataclass
class Image:
    """A stage of the Containerfile: its files and settings."""

    chroot: Chroot
    environ: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)

    def carry_out(self, instruction: str, value: str, stages: dict[str, "Image"]) -> None:
        """Carry out an instruction as an image builder does."""
        if instruction == "RUN":
            # An index behind this machine's certificates is not part of the image.
            pip = {name: text for name, text in os.environ.items() if name.startswith("PIP_")}
            self.chroot.succeed("sh", "-c", value, **{**self.environ, **pip, **_host_certificates(self.chroot)})
        elif instruction == "COPY":
            *sources, target = value.split()
            if sources[0].startswith("--from="):
                folder = stages[sources.pop(0).removeprefix("--from=")].chroot.path(sources[0])
                shutil.copytree(folder, self.chroot.path(target), symlinks=True)
            else:
                self.chroot.path(target).mkdir()
                for source in sources:
                    for file in ROOT.glob(source):
                        shutil.copy(file, self.chroot.path(target))
        elif instruction == "ENV":
            self.environ |= dict(pair.split("=", 1) for pair in shlex.split(value))
        else:
            self.settings[instruction] = value


def _host_certificates(chroot: Chroot) -> dict[str, str]:
    if not Path(_CA).is_file():
        return {}
    shutil.copy(_CA, chroot.path("/host.crt"))
    return {"PIP_CERT": "/host.crt"}


def instructions() -> Iterator[tuple[str, str]]:
    """Yield the instructions of the Containerfile."""
    text = (ROOT / "packaging" / "Containerfile").read_text()
    for line in text.replace("\\\n", "").splitlines():
        if line and not line.startswith("#"):
            instruction, _, value = line.partition(" ")
            yield instruction, value


@pytest.fixture(scope="module")
def image(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """The last stage."""
    if not list((ROOT / "dist").glob("*.whl")):
        pytest.skip("dist/ has no wheel: run `make dist`")
    stages: dict[str, Image] = {}
    for instruction, value in instructions():
        if instruction == "ARG":
            # The base has the same packages as debootstrap's smallest variant, without its documents.
            assert value == "BASE=docker.io/library/debian:bookworm-slim"
        elif instruction == "FROM":
            assert value.split()[0] == "$BASE"
            last = stages[value.split()[-1]] = Image(copy_of(bare, tmp_path_factory.mktemp("stage") / "root"))
        else:
            last.carry_out(instruction, value, stages)
    yield last
    for stage in stages.values():
        shutil.rmtree(stage.chroot.root)


def test_image_has_no_compiler_and_no_loose_permissions(image: Image) -> None:
    for tool in ("cc", "gcc", "javac", "make"):
        assert image.chroot.run("sh", "-c", f"command -v {tool}").returncode, tool
    added = ["find", "/opt/sr-assets", "-perm", "/6000", "-o", "-perm", "-o+w", "-not", "-type", "l"]
    assert image.chroot.succeed(*added) == ""


def test_container_replicates_on_a_read_only_root(image: Image, rig: Rig, tmp_path: Path) -> None:
    image.chroot.path("/etc/sr-assets").mkdir()
    command = [*json.loads(image.settings["ENTRYPOINT"]), *json.loads(image.settings["CMD"])]
    volume, folder, user = (image.settings[key] for key in ("VOLUME", "WORKDIR", "USER"))
    environ = {**image.environ, "SOURCE": rig.source.url}
    service = Service(image.chroot, command, environ, [volume], user, folder)
    # A volume may belong to root, writable for the group.
    image.chroot.succeed("sh", "-c", f"chown root:{user.partition(':')[2]} {volume}; chmod 2775 {volume}")
    assert_replicates(service, rig, tmp_path / "log", "${SOURCE}")
