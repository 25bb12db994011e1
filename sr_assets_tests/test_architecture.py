"""The architecture, read from the source: rings import downwards."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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
    "dagster_internals",
    "dagster_storage",
    "spark_engine",
    "resources",
    "assets",
    "automation",
    "definitions",
    "component",
    "operate",
    "embedded",
    "measure",
    "cli",
    "__main__",
)

# The most files and lines of each ring's folder, so that growth is a decision: raise a number only in a commit that says why.
BUDGETS = {
    "domain": (42, 5_750),
    "settings": (23, 5_400),
    # Two ways to a socket's user: the kernel names one in microseconds, but not on each system. Merged files of a history
    # may hold the rows of a part together.
    "adapters": (109, 22_520),
    # A recovery from a source that lacks messages knows their time to be blind, continues announced silences, and restores the
    # blind time that only these show; the rebuilding of the nodes has its own module.
    "stages": (54, 12_880),
    "assets": (13, 2_300),
    "automation": (11, 1_550),
    "operate": (27, 5_170),
    "embedded": (13, 2_640),
    "measure": (8, 1_420),
    "cli": (28, 4_480),
}
# Rooms in which a module's name is what users type: a block of the configuration, a command, an asset.
NAMED_BY_USERS = {"settings", "cli", "assets", "automation"}

MAX_TEST_NAME = 70
# Names that describe nothing; a dataclass's field may be called `found`, like a table's column.
VAGUE_NAMES = {"one", "found", "what"}

MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__").removesuffix("__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
# The benchmark and the soak are not in the wheel and belong to no ring.
ALL_SOURCES = MODULES | {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "sr_assets_bench").rglob("*.py"))}


TESTS = sorted(Path(__file__).parent.rglob("*.py"))


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


@cache
def imports(module: str) -> set[str]:
    """Return every name that a module imports, at any level, as an absolute name."""
    names: set[str] = set()
    package = ["sr_assets", *module.split(".")]
    if MODULES[module].name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *filter(None, [node.module])])
            names.update(f"{origin}.{alias.name}" for alias in node.names)
    return names


def test_a_module_imports_only_its_own_and_inner_rings() -> None:
    outwards = {
        (module, imported)
        for module in filter(None, MODULES)
        for imported in {resolve(name) for name in imports(module)} - {""}
        if ring(imported) > ring(module)
    }
    assert outwards == {("settings.loading", "adapters.data")}


def in_circles(edges: dict[str, set[str]]) -> set[str]:
    """Return the nodes of a graph that lie on a circle, or between two."""
    # Remove nodes that import, or are imported by, none of the remaining ones; only circles remain.
    while removable := {
        name
        for name, imported in edges.items()
        if not imported & edges.keys() or not any(name in others for others in edges.values())
    }:
        edges = {name: imported for name, imported in edges.items() if name not in removable}
    return set(edges)


def test_modules_import_each_other_in_no_circle() -> None:
    """Imports inside functions and for the type checker count too."""
    edges = {module: {resolve(name) for name in imports(module)} - {"", module} for module in MODULES}
    edges["settings.loading"].remove("adapters.data")
    assert in_circles(edges) == set()


def test_packages_of_a_ring_import_each_other_in_no_circle() -> None:
    edges: dict[str, set[str]] = {package(module): set() for module in MODULES if "." in module}
    for module in (module for module in MODULES if "." in module):
        for imported in {package(resolve(name)) for name in imports(module)} - {package(module)}:
            if "." in imported and ring(imported) == ring(module):
                edges[package(module)].add(imported)
    assert in_circles(edges) == set()


def test_folders_stay_within_their_budgets() -> None:
    sizes = {name: [path for module, path in MODULES.items() if module.partition(".")[0] == name] for name in BUDGETS}
    used = {
        name: (len(paths), sum(len(path.read_text().splitlines()) for path in paths)) for name, paths in sizes.items()
    }
    assert {name: size for name, size in used.items() if size[0] > BUDGETS[name][0] or size[1] > BUDGETS[name][1]} == {}
    assert {module.partition(".")[0] for module in MODULES if "." in module} == BUDGETS.keys()


def test_modules_of_different_rooms_have_names_of_their_own() -> None:
    places: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        if path.name != "__init__.py" and module.partition(".")[0] not in NAMED_BY_USERS:
            places.setdefault(module.rpartition(".")[2], []).append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def test_no_module_is_imported_by_its_name_in_a_text() -> None:
    users = {module for module, path in MODULES.items() if re.search(r"import_module\(|__import__\(", path.read_text())}
    # A worker's libraries, what a process imports for its later copies, and what Dagster imports at a run.
    assert users == {"adapters.spark.jobs", "automation.fork_server", "dagster_internals", "operate.forking"}


def test_no_class_is_a_function_in_disguise() -> None:
    """Constructing an object only to call its single method is a function with its arguments in two places."""
    trees = [ast.parse(path.read_text()) for path in MODULES.values()]
    single: dict[str, str] = {}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef) and not node.bases:
            names = [part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
            public = [name for name in names if name != "__init__" and (not name.startswith("_") or name[:2] == "__")]
            if len(public) == 1:
                single[node.name] = public[0]
    assert single
    uses: dict[str, set[bool]] = {}
    for tree in trees:
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        at_once = {id(call.func.value) for call in calls if isinstance(call.func, ast.Attribute)}
        for call in calls:
            name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
            if name in single:
                uses.setdefault(name, set()).add(id(call) in at_once)
    assert [name for name, at_once_only in uses.items() if at_once_only == {True}] == []


def test_results_are_fetched_to_their_end() -> None:
    """Registering a table fails on a connection with an unfinished result, but only if the machine is busy."""
    assert [module for module, path in ALL_SOURCES.items() if ".fetchone(" in path.read_text()] == []


def test_names_of_tests_are_short() -> None:
    names = {name for path in TESTS for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert names
    assert not [name for name in names if len(name) > MAX_TEST_NAME]


def bound_names(path: Path) -> Iterator[str]:
    """Yield the names of a source's variables and parameters, without the fields of classes."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    fields = {id(part.target) for node in classes for part in node.body if isinstance(part, ast.AnnAssign)}
    for node in nodes:
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields:
            yield node.id


def test_variables_have_descriptive_names() -> None:
    sources = [*ALL_SOURCES.values(), *TESTS]
    assert {path: names for path in sources if (names := VAGUE_NAMES & {*bound_names(path)})} == {}


def test_rules_and_settings_read_no_clock() -> None:
    clocks = {"time.time", "time.time_ns", "time.monotonic", "datetime.now", "date.today"}
    inner = [module for module in MODULES if ring(module or "domain") <= RINGS.index("settings")]
    nodes = [(module, node) for module in inner for node in ast.walk(ast.parse(MODULES[module].read_text()))]
    calls = [(module, ast.unparse(node.func)) for module, node in nodes if isinstance(node, ast.Call)]
    assert [(module, called) for module, called in calls if called in clocks] == []
