"""The README and `docs/`: examples work, links resolve, and the reference is complete.

The first line of a fenced block names its kind: `yaml` (a whole configuration), `yaml fragment` (some keys of one), `sql`
(queries on the published tables), `console` (commands after `$`), `python` (a script), `python asset` (a Dagster module),
`python data` (an asset that reads a data source), `python inputs` (assets with tables as inputs), `python condition` (an
automation condition), `python lake` (a script that reads a lake, run by `assets/test_lake.py`). `test_tutorials.py` knows
those of the tutorials.
"""

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import click
import dagster as dg
import duckdb
import pytest
import yaml

from sr_assets import build_definitions
from sr_assets.adapters.data import SourceReader
from sr_assets.adapters.published.catalog import COLUMN_TYPES, columns_of
from sr_assets.adapters.published.daily_tables import AVAILABILITY
from sr_assets.adapters.published.fleet_reader import open_fleet, read_rows
from sr_assets.cli.base import SECTIONS, cli
from sr_assets.operate.webserver import anchor
from sr_assets.settings import load_settings, mapping
from sr_assets.settings.entries import CommonKeys
from sr_assets.settings.key_tables import key_table
from sr_assets.settings.references import Known
from sr_assets_tests.automation.test_downstream import ON_EACH_CHANGE
from sr_assets_tests.published import MINUTE_NS, node_row, publish_message, publish_nodes

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
#: A block, which may be in a list.
_BLOCK = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
#: The keys that every entry needs.
_ENTRY = {"stream": "S", "source_url": "a:1", "target_url": "b:1"}
#: The values of the sources in the examples.
_VALUES = {"cadence": "1m", "paused": "false", "SOURCE": "nats://a:1", "orders.interval": "2h"}
_PRIVATE_TABLE = "latest_snapshots"


@dataclass(frozen=True)
class Block:
    """A fenced block of a document, identified by its line."""

    document: Path
    line: int
    info: str
    text: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(*infos: str) -> list[Block]:
    """Return the blocks of these kinds in all documents."""
    return [
        Block(document, text.count("\n", 0, match.start()) + 1, match[2], dedent(match[3]))
        for document in DOCUMENTS
        for text in [document.read_text()]
        for match in _BLOCK.finditer(text)
        if match[2] in infos
    ]


def commands() -> list[tuple[Block, str]]:
    """Return every command line of the console blocks."""
    return [
        (block, line.removeprefix("$ "))
        for block in blocks("console", "console terminal")
        for line in block.text.splitlines()
        if line.startswith("$ ")
    ]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with three nodes, one of them silent, and one message."""
    home = tmp_path_factory.mktemp("documents")
    publish_nodes(
        home,
        node_row("web1.ldn.example.net", "up", 0),
        node_row("web2.ldn.example.net", "timeout", 20 * MINUTE_NS),
        node_row("web3.ldn.example.net", "retired", 80 * MINUTE_NS),
    )
    publish_message(home, "web1.ldn.example.net")
    return home


def test_every_block_has_a_known_kind() -> None:
    known = {
        "yaml",
        "yaml component",
        "yaml dagster",
        "yaml dbt",
        "yaml fragment",
        "sql",
        "sql dbt",
        "console",
        "console terminal",
        "python",
        "python tutorial",
        "python asset",
        "python data",
        "python guest",
        "python inputs",
        "python condition",
        "python spark",
        "python tables",
        "python analysis",
        "python lake",
        "mermaid",
        "text",
        "json",
        "nginx",
    }
    unknown = [
        f"{document.name}: {match[2]!r}"
        for document in DOCUMENTS
        for match in _BLOCK.finditer(document.read_text())
        if match[2] not in known and not re.match(r"(python|yaml) file \S+$", match[2])
    ]
    assert not unknown


@pytest.mark.parametrize("block", blocks("yaml", "yaml fragment"), ids=str)
def test_configuration_loads(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SourceReader, "read", lambda _self, _name, _source, key: Known(_VALUES[key], 1))
    text = block.text
    if block.info == "yaml fragment":
        keys = yaml.safe_load(text)
        entries = [{**_ENTRY, **entry} for entry in keys.pop("streams", [{}])]
        text = yaml.safe_dump({"name": "X", "streams": entries, **keys})
    file = tmp_path / "replication.yaml"
    file.write_text(text)
    environment = dict.fromkeys(re.findall(r"\$\{(\w+)\}", text), "value")
    settings = load_settings(file, environment)
    assert settings.entries or settings.topology or settings.heartbeats
    assert not settings.warnings


@pytest.mark.parametrize("file", sorted((ROOT / "conf").glob("*.yaml")), ids=lambda file: file.name)
def test_example_in_conf_loads(file: Path) -> None:
    names = re.findall(r"\$\{(\w+)\}", file.read_text())
    assert load_settings(file, {name: f"host-{name.lower().replace('_', '-')}:4222" for name in names}).entries


@pytest.mark.parametrize("block", blocks("sql"), ids=str)
def test_query_runs(block: Block, home: Path) -> None:
    with open_fleet(home, confined=True) as connection:
        for statement in duckdb.extract_statements(block.text):
            assert read_rows(connection, statement.query).columns


@pytest.mark.parametrize(("block", "line"), commands(), ids=str)
def test_command_line_parses(block: Block, line: str) -> None:
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words.pop(0)
    if words[0] == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {word for word in words[1:] if "=" not in word} <= targets
    elif Path(words[0]).name == "sr-assets":
        parse(words[1:])


def parse(arguments: list[str]) -> None:
    """Parse a command line without running it; raise click's error if it is wrong."""
    command: click.Command = cli
    while isinstance(command, click.Group):
        at = next((index for index, word in enumerate(arguments) if word in command.commands), None)
        assert at is not None, f"no command of {command.name} in {arguments}"
        command.make_context(command.name, arguments[:at], resilient_parsing=True)
        command, arguments = command.commands[arguments[at]], arguments[at + 1 :]
    command.make_context(command.name, list(arguments))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_links_resolve_to_files_and_headings(document: Path) -> None:
    text = _BLOCK.sub("", document.read_text())
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+://", target):
            continue
        path, _, heading = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        if not file.exists() or (heading and heading not in anchors(file)):
            wrong.append(target)
    assert not wrong


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", _BLOCK.sub("", document.read_text()), re.MULTILINE)
    return {anchor(heading) for heading in headings}


def page(name: str) -> str:
    """Return a page of the documents."""
    return (ROOT / "docs" / f"{name}.md").read_text()


def subsection(text: str, title: str) -> str:
    """Return the part of a page below a heading of the third level, or "" without it."""
    return text.partition(f"\n### {title}\n")[2].partition("\n### ")[0]


def all_commands() -> Iterator[tuple[str, click.Command]]:
    for name, command in cli.commands.items():
        if isinstance(command, click.Group):
            yield from ((f"{name} {sub}", subcommand) for sub, subcommand in command.commands.items())
        else:
            yield name, command


@pytest.mark.parametrize(("name", "command"), [pytest.param(*each, id=each[0]) for each in all_commands()])
def test_reference_has_every_command_with_its_options(name: str, command: click.Command) -> None:
    usage = re.search(rf"^sr-assets {name}\b.*(?:\n    .*)*", page("commands"), re.MULTILINE)
    assert usage is not None, f"{name} is missing"
    # The options of all commands are described once.
    own = [parameter for parameter in command.params if parameter not in cli.params]
    options = {option for parameter in own for option in parameter.opts if option.startswith("--")}
    assert {option for option in options if not re.search(rf"{option}\b", usage[0])} == set()


def test_reference_has_the_sections_of_the_help() -> None:
    assert re.findall(r"^## (.+)$", page("commands"), re.MULTILINE) == list(SECTIONS)


@pytest.mark.parametrize(("name", "command"), [pytest.param(*each, id=each[0]) for each in all_commands()])
def test_help_of_every_command_ends_with_an_example_that_parses(name: str, command: click.Command) -> None:
    example = str(command.epilog).removeprefix("Example: sr-assets ")
    assert example.startswith(name)
    if name != "login":  # it asks for a password
        parse(shlex.split(example))


def configuration_blocks(base: type[mapping.Block] = mapping.Block) -> Iterator[type[mapping.Block]]:
    """Yield every block of the configuration, without the bases that only others extend."""
    for subclass in base.__subclasses__():
        if subclass is not CommonKeys:
            yield subclass
        yield from configuration_blocks(subclass)


@pytest.mark.parametrize("block", list(configuration_blocks()), ids=lambda block: block.__name__)
def test_reference_lists_the_keys_of_the_settings(block: type[mapping.Block]) -> None:
    assert key_table(block) in page("configuration")


def column_table(table: str) -> str:
    """Return the reference of a table's columns as the document has it."""
    rows = (f"| `{name}` | {kind} | {description} |" for name, kind, description in columns_of(table))
    return "\n".join(("| column | type | meaning |", "| --- | --- | --- |", *rows, ""))


@pytest.mark.parametrize("table", sorted(COLUMN_TYPES.keys() - {"messages", "lake"}))
def test_reference_lists_the_columns_of_the_schema(table: str) -> None:
    assert column_table(table) in subsection(page("columns"), table)


def test_reference_lists_the_columns_of_a_lake() -> None:
    assert column_table("lake") in page("columns").partition("\n## Lake\n")[2]


def test_reference_has_every_table_with_its_columns(home: Path) -> None:
    with open_fleet(home) as connection:
        columns = connection.execute("SELECT table_name, column_name FROM information_schema.columns").fetchall()
    public = [(table, column) for table, column in columns if table != _PRIVATE_TABLE]
    text = page("columns")
    assert not [each for each in public if f"| `{each[1]}` |" not in subsection(text, each[0])]


@pytest.fixture
def graph(tmp_path: Path) -> Any:
    """The assets of a tracked stream, a feed and a native stream."""
    from sr_assets.definitions import build

    file = tmp_path / "replication.yaml"
    entry: dict[str, Any] = {**_ENTRY, "inspect_field": "sender", "inspect_duration": "1h"}
    feed = {"name": "centre", "stream": "ADVISORIES", "url": "b:1"}
    entry["lake"] = {"path": "lake"}
    native = {"cluster": "here", "stream": "N", "mirror": {"cluster": "there", "stream": "O"}}
    topology = {"clusters": {"here": {"url": "c:1"}, "there": {"url": "d:1"}}, "streams": [native]}
    file.write_text(yaml.safe_dump({"name": "X", "streams": [entry], "feeds": [feed], "topology": topology}))
    return build(load_settings(file, {"SR_ASSETS_HOME": str(tmp_path)})).resolve_asset_graph()


def test_reference_and_troubleshooting_have_every_check(graph: Any) -> None:
    checks = {key.name for key in graph.asset_check_keys}
    nouns = {key.path[-1] for key in graph.get_all_asset_keys() if key.path[0] in ("X", "centre")}
    reference = page("assets")
    assert not [name for name in checks | nouns if f"`{name}`" not in reference]
    assert not [name for name in checks if not re.search(rf"^\| `{name}`", page("troubleshooting"), re.MULTILINE)]


def test_every_asset_links_to_a_section_of_the_documents(graph: Any) -> None:
    link = re.compile(r"See \[docs/[a-z]+\.md\]\(/docs/([a-z]+\.md)#([a-z0-9-]+)\)\.$")
    for key in graph.get_all_asset_keys():
        match = link.search(graph.get(key).description or "")
        assert match, key
        assert match[2] in anchors(ROOT / "docs" / match[1]), key


def configure(folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "replication.yaml"
    entry = {**_ENTRY, "name": "london", "stream": "REG", "inspect_field": "sender", "inspect_duration": "1h"}
    file.write_text(yaml.safe_dump({"name": "X", "streams": [entry]}))
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(file))
    monkeypatch.setenv("SR_ASSETS_HOME", str(home))


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_script_runs(
    block: Block, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(tmp_path, home, monkeypatch)
    exec(compile(block.text, str(block), "exec"), {})
    assert re.search("web2|timeout", capsys.readouterr().out)


@pytest.mark.parametrize("block", blocks("python analysis"), ids=str)
def test_analysis_is_the_example_and_draws_a_chart(
    block: Block, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert block.text == (ROOT / "examples" / "availability" / "analysis.py").read_text()
    columns = {
        "name": "'london'",
        "node": "'web2'",
        "up_seconds": "86000.0",
        "timeout_seconds": "400.0",
        "final": "true",
    }
    zeros = dict.fromkeys(("retired_seconds", "outages"), "0")
    dates = [date(2026, 1, 30), date(2026, 1, 31)]
    values = ", ".join(
        f"{(columns | zeros).get(name, 'NULL')} AS {name}" for name in AVAILABILITY.kinds if name != "date"
    )
    rows = " UNION ALL ".join(f"SELECT DATE '{day}' AS date, {values}" for day in dates)
    copy = shutil.copytree(home, tmp_path / "home")
    with duckdb.connect() as connection:
        AVAILABILITY.write_days(connection, copy, rows, dates, 0o600)
    configure(tmp_path, copy, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    exec(compile(block.text, str(block), "exec"), {})
    assert re.search(r"london +web2 +0 +0\.22", capsys.readouterr().out)
    assert "<svg" in (tmp_path / "availability.svg").read_text()


@pytest.mark.parametrize("block", blocks("python data"), ids=str)
def test_data_source_is_read(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sr_assets.definitions import build

    file = tmp_path / "replication.yaml"
    sources = {"ops": {"type": "memory", "values": {"cadence": "2h", "recipients": "on-call"}}}
    file.write_text(yaml.safe_dump({"name": "X", "streams": [_ENTRY], "data": sources}))
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(file))
    module = ModuleType("my_report")
    exec(compile(block.text, str(block), "exec"), module.__dict__)
    assert module.cadence == "2h"
    settings = load_settings(file, {"SR_ASSETS_HOME": str(tmp_path)})
    job = dg.define_asset_job("report", [module.report])
    definitions = dg.Definitions.merge(build(settings), dg.Definitions(assets=[module.report], jobs=[job]))
    with dg.DagsterInstance.ephemeral() as instance:
        result = definitions.resolve_job_def("report").execute_in_process(instance=instance)
    (recorded,) = result.asset_materializations_for_node("report")
    assert recorded.metadata["recipients"].value == "on-call"


@pytest.mark.parametrize("block", blocks("python guest"), ids=str)
def test_guest_is_merged(block: Block, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(tmp_path, home, monkeypatch)
    monkeypatch.chdir(tmp_path)
    module = ModuleType("definitions")
    exec(compile(block.text, str(block), "exec"), module.__dict__)
    dg.Definitions.validate_loadable(module.defs)
    assert dg.AssetKey(["choria", "fleet", "last_seen_nodes"]) in module.defs.resolve_asset_graph().get_all_asset_keys()


@pytest.mark.parametrize("block", blocks("python inputs"), ids=str)
def test_tables_are_inputs_of_users_assets(
    block: Block, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(tmp_path, home, monkeypatch)
    module = ModuleType("my_assets")
    exec(compile(block.text, str(block), "exec"), module.__dict__)
    mine = [module.nodes_by_domain, module.silent_nodes]
    platform = build_definitions(tmp_path / "replication.yaml", key_prefix="choria")
    job = dg.Definitions.merge(platform, dg.Definitions(assets=mine)).resolve_implicit_global_asset_job_def()
    with dg.DagsterInstance.ephemeral() as instance:
        result = job.execute_in_process(instance=instance, asset_selection=[each.key for each in mine])
    assert result.output_for_node("nodes_by_domain").sum() == 2
    assert result.output_for_node("silent_nodes") == 1


@pytest.mark.parametrize("block", blocks("python condition"), ids=str)
def test_condition_is_the_one_that_loses_no_change(block: Block) -> None:
    module = ModuleType("my_condition")
    exec(compile(block.text, str(block), "exec"), module.__dict__)
    assert module.on_each_change == ON_EACH_CHANGE


@pytest.mark.parametrize("block", blocks("yaml dagster"), ids=str)
def test_instance_accepts_the_settings(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dagster.yaml").write_text(block.text)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    with dg.DagsterInstance.get() as instance:
        assert instance.get_run_records() == []


@pytest.mark.parametrize("block", blocks("yaml component"), ids=str)
def test_component_is_the_example(block: Block) -> None:
    example = ROOT / "examples" / "component" / "src" / "my_project" / "defs" / "fleet" / "defs.yaml"
    assert block.text == example.read_text()


@pytest.mark.parametrize("block", blocks("python asset"), ids=str)
def test_users_asset_materialises_on_the_platform(
    block: Block, tmp_path: Path, engine_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(engine_home / "sites", ignore_errors=True)
    (engine_home / "fleet.duckdb").unlink(missing_ok=True)
    publish_nodes(
        engine_home,
        node_row("web1.ldn.example.net", "up", 0),
        node_row("web2.ldn.example.net", "timeout", 20 * MINUTE_NS),
        node_row("db1.ldn.example.net", "timeout", 20 * MINUTE_NS),
        node_row("web1.par.example.net", "timeout", 20 * MINUTE_NS),
    )
    configure(tmp_path, engine_home, monkeypatch)
    module = ModuleType("my_fleet")
    exec(compile(block.text, str(block), "exec"), module.__dict__)
    definitions: dg.Definitions = module.defs
    with dg.DagsterInstance.ephemeral() as instance:
        result = definitions.resolve_job_def("count_silent_domains").execute_in_process(instance=instance)
    (recorded,) = result.asset_materializations_for_node("silent_domains")
    metadata: dict[str, Any] = {key: value.value for key, value in recorded.metadata.items()}
    assert metadata == {"silent_nodes": 3, "by_domain": {"ldn.example.net": 2, "par.example.net": 1}}


def threats() -> list[tuple[str, list[str]]]:
    """Return each threat of the document with the tests that it names."""
    rows = re.findall(r"^- \*\*(.+?)\.\*\* .+ \*Tests:\* (.+)$", page("threats"), re.MULTILINE)
    return [(threat, re.findall(r"`(\w+)`", tests)) for threat, tests in rows]


def test_each_threat_names_tests_that_exist() -> None:
    sources = (file.read_text() for file in (ROOT / "sr_assets_tests").rglob("test_*.py"))
    existing = {name for source in sources for name in re.findall(r"^(?:async )?def (test_\w+)", source, re.MULTILINE)}
    assert len(threats()) > 30
    assert [threat for threat, tests in threats() if not tests] == []
    assert [test for _, tests in threats() for test in tests if test not in existing] == []


@pytest.mark.parametrize(
    "document", sorted((ROOT / "docs").glob("*.md")), ids=lambda document: str(document.relative_to(ROOT))
)
def test_contents_list_every_section_in_order(document: Path) -> None:
    text = _BLOCK.sub("", document.read_text())
    listed = re.findall(r"^- \[([^\]]+)\]\(#[^)]+\)$", text.partition("\n## ")[0], re.MULTILINE)
    sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert listed in ([], sections)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_rows_of_tables_fit_a_window(document: Path) -> None:
    assert [line for line in document.read_text().splitlines() if line.startswith("|") and len(line) > 300] == []


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 700


def test_changelog_has_one_unreleased_version_at_the_top() -> None:
    versions = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == "Unreleased"
    assert "Unreleased" not in versions[1:]
