"""Delete the files in an environment that no part of this platform loads: `python slim.py [SITE_PACKAGES]`.

The builds of packages and images run it. `sr_assets_tests/packages/test_slim.py` checks that no remaining class needs a
deleted one. After a change of the pinned PySpark, run `make test-packages`.
"""

import platform
import re
import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path

#: The beginnings of the names in `pyspark/jars`, by the reason why no part loads them.
JARS = {
    "Hive's metastore, server and dialect: our catalog is in memory, and ORC needs only hive-storage-api": """
        HikariCP- ST4- antlr-runtime- commons-dbcp- datanucleus- derby hive-beeline- hive-cli- hive-common- hive-exec-
        hive-jdbc- hive-metastore- hive-serde- hive-service- hive-shims- javax.jdo- javolution- jdo-api- jpam- json-1
        jta- libfb303- libthrift- spark-hive transaction-api-
    """,
    "masters on Kubernetes and YARN: `spark.mode` is an engine of this host, spark:// or sc://": """
        kubernetes- spark-kubernetes_ spark-yarn_ vertx- volcano- zjsonpatch-
    """,
    "shells for Scala and SQL; janino, not Scala's compiler, compiles generated code": """
        connect-repl java-diff-utils- jline- scala-compiler- spark-repl_ super-csv-
    """,
}
#: Other files and folders, by the reason.
FILES = {
    "tests and examples": """
        numpy/**/tests matplotlib/tests mpl_toolkits/*/tests pandas/tests py4j/tests pyarrow/tests pyspark/data
        pyspark/examples pyarrow/_pyarrow_cpp_tests*
    """,
    "headers, archives and further copies of libraries, for compilers": """
        numpy/_core/include numpy/_core/lib/*.a pyarrow/include pyarrow/*.so.*.*.* pyarrow/libarrow*.so pyarrow/src
    """,
    "Arrow Flight, a protocol that no part speaks": "pyarrow/_flight* pyarrow/libarrow_flight* pyarrow/libarrow_python_flight*",
    "the backend for PyPy": "zstandard/_cffi*",
    "source maps for developers of the UI": "dagster_webserver/**/*.map",
}
_LIBRARY = re.compile(r"\.(so|dll|dylib|jnilib)$")
_OURS = {
    "x86_64": re.compile(r"linux(64|.?amd64|.?x86_64)[./]", re.IGNORECASE),
    "aarch64": re.compile(r"linux.?(aarch_?64|arm64)[./]", re.IGNORECASE),
}


def patterns() -> list[str]:
    """Return all patterns, relative to site-packages."""
    jars = [f"pyspark/jars/{beginning}*" for names in JARS.values() for beginning in names.split()]
    return [*jars, *" ".join(FILES.values()).split()]


def slim(packages: Path) -> None:
    """Delete the files and the libraries."""
    for pattern in patterns():
        for path in list(packages.glob(pattern)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    if ours := _OURS.get(platform.machine()):
        for jar in packages.glob("pyspark/jars/*.jar"):
            drop_foreign_libraries(jar, ours)


def drop_foreign_libraries(jar: Path, ours: re.Pattern[str]) -> None:
    """Rewrite a jar without the native libraries of other systems and processors."""
    with zipfile.ZipFile(jar) as old:
        kept = [entry for entry in old.infolist() if not _LIBRARY.search(entry.filename) or ours.search(entry.filename)]
        if len(kept) == len(old.infolist()):
            return
        draft = jar.with_suffix(".draft")
        with zipfile.ZipFile(draft, "w") as new:
            for entry in kept:
                new.writestr(entry, old.read(entry), compresslevel=9)
    draft.replace(jar)


if __name__ == "__main__":
    slim(Path(sys.argv[1] if sys.argv[1:] else sysconfig.get_path("purelib")))
