"""The architecture, read from the source: rings import downwards."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sr_assets"

# From the centre outwards. A ring imports only itself and the rings before it.
RINGS = (
    "domain",
    "settings",
    "adapters",
    "api",
    "spark",
    "stages",
    "spark_engine",
    "resources",
    "assets",
    "automation",
    "definitions",
    "operate",
    "embedded",
    "measure",
    "cli",
    "__main__",
)

# Within a ring, a package or a module next to the packages imports only those before it.
PACKAGE_ORDER = {
    "adapters": (
        "times",
        "checkpoints",
        "connection_table",
        "extras",
        "garbage",
        "locking",
        "private",
        "threads",
        "run_failures",
        "puppet_ca",
        "home",
        "logs",
        "signing",
        "login",
        "choria",
        "security",
        "jetstream",
        "wire",
        "connection_file",
        "bucket",
        "election",
        "nats",
        "state",
        "published",
        "data",
        "copying",
        "spark",
    ),
    "stages": (
        "clock",
        "maintained_time",
        "daily",
        "report",
        "probes",
        "progress",
        "candidate",
        "leadership",
        "locks",
        "heartbeat_publisher",
        "members",
        "checkpointing",
        "connections",
        "pace",
        "work_loop",
        "site",
        "saving",
        "following",
        "source",
        "topology",
        "tracking",
        "replication",
        "feeds",
        "permissions",
        "election_check",
        "connectivity",
        "forgetting",
        "entry_work",
        "stream_work",
        "run",
        "retiring",
    ),
}

MAX_TEST_NAME = 70
# Names that describe nothing; a dataclass's field may be called `found`, like a table's column.
VAGUE_NAMES = {"one", "found", "what"}

MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__").removesuffix("__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
# The benchmark and the soak are not in the wheel and belong to no ring.
ALL_SOURCES = MODULES | {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "sr_assets_bench").rglob("*.py"))}


def ring(module: str) -> int:
    """Return the position of a module's ring; the modules of a folder share its ring."""
    return RINGS.index(module.partition(".")[0])


def package(module: str) -> str:
    """Return the package of its ring that a module belongs to; a module next to the packages is its own."""
    return ".".join(module.split(".")[:2])


def resolve(name: str) -> str:
    """Return the module of `sr_assets` that an imported name is or is in, or "" for a library's."""
    top, _, rest = name.partition(".")
    return next((m for m in (rest, rest.rpartition(".")[0]) if m in MODULES), "") if top == "sr_assets" else ""


def imports(module: str, tree: ast.AST) -> Iterator[str]:
    """Yield every name that a source imports, at any level, as an absolute name."""
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
def test_a_module_imports_only_its_own_and_inner_rings(module: str) -> None:
    imported = {resolve(name) for name in imports(module, ast.parse(MODULES[module].read_text()))} - {"", "cli.render"}
    assert not [name for name in imported if ring(name) > ring(module)]


def package_imports() -> dict[str, set[str]]:
    """Return the packages of the same ring that each package imports."""
    edges: dict[str, set[str]] = {package(module): set() for module in MODULES if "." in module}
    for module in (module for module in MODULES if "." in module):
        for name in imports(module, ast.parse(MODULES[module].read_text())):
            imported = package(resolve(name))
            if "." in imported and imported != package(module) and ring(imported) == ring(module):
                edges[package(module)].add(imported)
    return edges


@pytest.mark.parametrize("of_ring", PACKAGE_ORDER)
def test_a_package_imports_only_earlier_packages_of_its_ring(of_ring: str) -> None:
    order = PACKAGE_ORDER[of_ring]
    edges = {name: imported for name, imported in package_imports().items() if name.startswith(f"{of_ring}.")}
    assert set(order) == {name.partition(".")[2] for name in edges}
    position = {f"{of_ring}.{name}": index for index, name in enumerate(order)}
    later = {
        (name, other) for name, imported in edges.items() for other in imported if position[other] > position[name]
    }
    assert not later


def test_packages_of_a_ring_import_each_other_in_no_circle() -> None:
    edges = package_imports()
    # Remove packages that import, or are imported by, none of the remaining ones; only circles remain.
    while removable := {
        name
        for name, imported in edges.items()
        if not imported & edges.keys() or not any(name in others for others in edges.values())
    }:
        edges = {name: imported for name, imported in edges.items() if name not in removable}
    assert not edges


@pytest.mark.parametrize("module", ALL_SOURCES)
def test_results_are_fetched_to_their_end(module: str) -> None:
    """Registering a table fails on a connection with an unfinished result, but only if the machine is busy."""
    assert ".fetchone(" not in ALL_SOURCES[module].read_text()


def test_names_of_tests_are_short() -> None:
    sources = [ast.parse(path.read_text()) for path in sorted(Path(__file__).parent.rglob("test_*.py"))]
    nodes = [node for source in sources for node in ast.walk(source)]
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    assert names
    assert not [name for name in names if len(name) > MAX_TEST_NAME]


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names of a source's variables and parameters, without the fields of classes."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = {id(part.target) for node in classes for part in node.body if isinstance(part, ast.AnnAssign)}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields:
            yield node.id


def test_variables_have_descriptive_names() -> None:
    sources = [*ALL_SOURCES.values(), *sorted(Path(__file__).parent.rglob("*.py"))]
    vague = {path: names for path in sources if (names := VAGUE_NAMES & {*bound_names(ast.parse(path.read_text()))})}
    assert vague == {}


@pytest.mark.parametrize(
    "module", [module for module in MODULES if ring(module or "domain") <= RINGS.index("settings")]
)
def test_rules_and_settings_read_no_clock(module: str) -> None:
    calls = {
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(node, ast.Call)
    }
    assert not calls & {"time.time", "time.time_ns", "time.monotonic", "datetime.now", "date.today"}
