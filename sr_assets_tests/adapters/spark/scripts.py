"""Scripts of a user who reads and writes streams with PySpark, in processes that inherit nothing from the tests.

A script in a process of its own is the whole of what a user runs, and takes ten seconds of processor time before its
first row. Scripts that need only a session therefore share one: `ScriptServer` runs them one after the other.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from sr_assets.adapters.spark.config import JAVA_OPTIONS, find_java
from sr_assets_tests.rig import PATIENCE_SECONDS

#: The session of every script. The Java options are our engine's: no script lasts until the optimizing compiler pays off.
_SESSION = f"""
import json, sys
from pyspark.sql import SparkSession, functions as f
from sr_assets.spark import register
spark = (SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
         .config("spark.sql.session.timeZone", "UTC").config("spark.sql.shuffle.partitions", "1")
         .config("spark.driver.extraJavaOptions", "{JAVA_OPTIONS}").getOrCreate())
register(spark)
"""
_HELPERS = """
def source(**options):
    return spark.read.format("jetstream").options(url=url, stream=stream, **options)
def show(value):
    print(json.dumps(value, default=str))
"""
_ARGUMENTS = "url, stream, folder = sys.argv[1:4]\n"
#: Answers have their own pipe, because Spark's JVM also writes to stdout. Each script has its own variables.
_SERVER = """
import contextlib, io, os, traceback
answers = os.fdopen(int(sys.argv[1]), "w")
for line in sys.stdin:
    text, *arguments = json.loads(line)
    names = {"spark": spark, "f": f, "json": json, **dict(zip(("url", "stream", "folder"), arguments))}
    printed, error = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        try:
            exec(text, names)
        except Exception:
            error = traceback.format_exc()
    for query in spark.streams.active:
        query.stop()
    print(json.dumps([printed.getvalue(), error]), file=answers, flush=True)
"""


class Printed(NamedTuple):
    """What a script printed, and its traceback if it failed."""

    text: str
    error: str | None


def clean_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a login that knows only where Java is."""
    return {"HOME": str(folder), "PATH": "/usr/bin:/bin", "JAVA_HOME": str(find_java(folder))}


def run_alone(text: str, url: str, stream: str, folder: Path) -> Printed:
    """Run a script in its own process."""
    program = _SESSION + _ARGUMENTS + _HELPERS + textwrap.dedent(text)
    done = subprocess.run(
        [sys.executable, "-c", program, url, stream, str(folder)],
        env=clean_environment(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return Printed(done.stdout, done.stderr if done.returncode else None)


class ScriptServer:
    """A process with one session, which runs scripts inside `with`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Self:
        ours, theirs = os.pipe()
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SESSION + _SERVER, str(theirs)],
                env=clean_environment(self._folder),
                cwd=self._folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                pass_fds=(theirs,),
            )
        os.close(theirs)
        self._answers: IO[str] = os.fdopen(ours)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._process.communicate(timeout=PATIENCE_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            self._answers.close()

    def run(self, text: str, url: str, stream: str, folder: Path) -> Printed:
        """Run a script in the shared session."""
        assert self._process.stdin is not None
        request: list[Any] = [_HELPERS + textwrap.dedent(text), url, stream, str(folder)]
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._answers.readline()
        assert answer, (self._folder / "log").read_text()
        return Printed(*json.loads(answer))
