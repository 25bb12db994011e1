"""Translation of Spark's errors about misconfigured clusters into one line; the original texts are Spark's own."""

import platform

import pytest

from sr_assets.adapters.spark.session import spark_error
from sr_assets.domain.errors import EngineLostError

DRIVER_PYTHON = ".".join(platform.python_version_tuple()[:2])
NO_START = """Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 times, most recent failure: Lost task 0.3 in \
stage 0.0 (TID 3) (127.0.0.1 executor 0): org.apache.spark.SparkException:
Error from python worker:
  Traceback (most recent call last):
    File "<frozen runpy>", line 189, in _run_module_as_main
  /opt/bin/python3.12: error while loading shared libraries: libpython3.12.so.1.0: cannot open shared object file
PYTHONPATH was:
  /opt/spark/python/lib/pyspark.zip
org.apache.spark.SparkException: EOFException occurred while reading the port number from pyspark.daemon's stdout.
"""
OTHER_PYTHON = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/opt/lib/pyspark/worker_util.py", line 93, in check_python_version
    raise PySparkRuntimeError(
pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has different version: \
3.12 than that in driver: 3.11, PySpark cannot run with different minor versions.
"""
NO_START_CLASSIC = f"""An error occurred while calling o95.getResult.
: org.apache.spark.SparkException: Exception thrown in awaitResult:
{NO_START}"""

OTHER_SPARK = """An error occurred while calling None.org.apache.spark.sql.classic.SparkSession.
: java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext.
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    (
        (NO_START, "the workers' Python does not start: /opt/bin/python3.12: error while loading shared libraries"),
        (
            NO_START_CLASSIC,
            "the workers' Python does not start: /opt/bin/python3.12: error while loading shared libraries",
        ),
        (
            OTHER_PYTHON,
            f"the workers' Python is 3.12 and ours {DRIVER_PYTHON}; install {DRIVER_PYTHON} there and set it",
        ),
        (OTHER_SPARK, "it refused or ended our application; check that its master and workers run Spark"),
        (f"An error occurred while calling o9.x.\n: {'x' * 9}\n\tat y", f"Spark: {'x' * 9}"),
    ),
    ids=("no Python", "no Python, classic mode", "other Python", "other Spark", "other error"),
)
def test_spark_error_is_one_line_about_the_cause(text: str, expected: str) -> None:
    message = str(spark_error(RuntimeError(text)))
    assert message.startswith(expected)
    assert "\n" not in message


@pytest.mark.parametrize("kind", ("SESSION_CLOSED", "SESSION_CHANGED", "SESSION_NOT_FOUND", "OPERATION_NOT_FOUND"))
def test_spark_error_is_engine_lost_when_session_does_not_exist(kind: str) -> None:
    text = f"[INVALID_HANDLE.{kind}] The handle 4ad76a37-c4b8-4692-8305-ce66d1b6dc7d is invalid. SQLSTATE: HY000"
    assert isinstance(spark_error(RuntimeError(text)), EngineLostError)
