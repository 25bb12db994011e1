"""What `packaging/slim.py` deletes, compared with the complete environment of the tests."""

import re
import runpy
import zipfile
from pathlib import Path

import pytest

from sr_assets.adapters.spark.engine import spark_home

_SLIM = runpy.run_path(str(Path(__file__).parent.parent.parent / "packaging" / "slim.py"))
_REFERENCE = re.compile(rb"(?<![\w$/])L?((?:[\w$]+/)+[\w$]+)")
#: ZooKeeper's own shell; Spark uses its client.
_UNUSED = {b"org/apache/zookeeper/JLineZNodeCompleter"}


@pytest.mark.timeout(900)
def test_kept_class_refers_to_no_deleted_class() -> None:
    beginnings = tuple(name for names in _SLIM["JARS"].values() for name in names.split())
    jars = list((spark_home() / "jars").glob("*.jar"))
    deleted = {jar for jar in jars if jar.name.startswith(beginnings)}
    kept = [jar for jar in jars if jar not in deleted]
    missing = set().union(*map(classes, deleted)) - set().union(*map(classes, kept))
    assert len(missing) > 10_000
    assert {name for jar in kept for name in referring(jar, missing)} <= _UNUSED


def classes(jar: Path) -> set[bytes]:
    """Return the names of the classes in a jar."""
    with zipfile.ZipFile(jar) as archive:
        return {name.removesuffix(".class").encode() for name in archive.namelist() if name.endswith(".class")}


def referring(jar: Path, missing: set[bytes]) -> set[bytes]:
    """Return the classes in a jar whose constants name a missing class."""
    with zipfile.ZipFile(jar) as archive:
        return {
            name
            for name in classes(jar)
            if not missing.isdisjoint(_REFERENCE.findall(archive.read(f"{name.decode()}.class")))
        }


def test_pattern_matches_a_file_of_the_pinned_release() -> None:
    packages = spark_home().parent
    assert [pattern for pattern in _SLIM["patterns"]() if not any(packages.glob(pattern))] == []


def test_jar_keeps_the_libraries_of_this_machine(tmp_path: Path) -> None:
    jar = tmp_path / "native.jar"
    names = ["a/A.class", "linux/amd64/a.so", "linux/aarch64/a.so", "Linux/x86_64-musl/a.so", "win/amd64/a.dll"]
    with zipfile.ZipFile(jar, "w") as archive:
        for name in names:
            archive.writestr(name, name)
    _SLIM["drop_foreign_libraries"](jar, _SLIM["_OURS"]["x86_64"])
    with zipfile.ZipFile(jar) as archive:
        assert archive.namelist() == names[:2]
