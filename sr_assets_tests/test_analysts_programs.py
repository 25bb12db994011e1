"""The published tables in programs of analysts: DuckDB's command line, dbt, SQLAlchemy, a notebook, each as its package."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from sr_assets_tests.published import MINUTE_NS, node_row, publish_message, publish_nodes

pytestmark = [pytest.mark.nightly, pytest.mark.process]
PAGE = (Path(__file__).parent.parent / "docs" / "tables.md").read_text()
PACKAGES = (
    "duckdb-cli==1.5.6",
    "dbt-core==1.12.0",
    "dbt-duckdb==1.11.1",
    "duckdb-engine",
    "nbclient==0.11.0",
    "ipykernel==7.4.0",
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs, in an environment that also finds this one's packages."""
    folder = tmp_path_factory.mktemp("programs")
    venv.create(folder, with_pip=True)
    # A release of dbt-core that builds from source loads more from elsewhere.
    install = ("-m", "pip", "install", "--quiet", "--only-binary", ":all:", *PACKAGES)
    subprocess.run([folder / "bin" / "python", *install], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (site / "ours.pth").write_text("\n".join([*ours, str(Path(__file__).parent.parent)]))
    return folder / "bin"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    publish_nodes(home, node_row("web1", "up", 0), node_row("web2", "timeout", 20 * MINUTE_NS))
    publish_message(home, "web1")
    return home


def printed(*words: str | Path, cwd: Path, **environ: str) -> str:
    done = subprocess.run(words, cwd=cwd, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def documented(info: str) -> str:
    """Return the only block of the page of this kind."""
    (text,) = re.findall(rf"```{info}\n(.*?)```", PAGE, re.DOTALL)
    return str(text)


def test_command_line_reads_a_home_where_it_is_and_where_it_was_moved(
    programs: Path, home: Path, tmp_path: Path
) -> None:
    query = "SELECT node, (SELECT count(*) FROM node_snapshot_history) FROM last_seen_nodes WHERE status = 'timeout'"
    assert (
        printed(programs / "duckdb", "-readonly", "-csv", "-noheader", home / "fleet.duckdb", query, cwd=tmp_path)
        == "web2,1\n"
    )
    moved = home.rename(tmp_path / "moved [1]")
    variable = f"SET VARIABLE sr_assets_home = '{moved}'"
    words = ("-readonly", "-csv", "-noheader", "-cmd", variable, moved / "fleet.duckdb", query)
    assert printed(programs / "duckdb", *words, cwd=tmp_path) == "web2,1\n"


def test_dbt_builds_the_documented_model(programs: Path, home: Path, tmp_path: Path) -> None:
    project = tmp_path / "dbt"
    (project / "models").mkdir(parents=True)
    (project / "dbt_project.yml").write_text("name: fleet_reports\nprofile: fleet_reports\nmodel-paths: [models]\n")
    profile = documented("yaml dbt").replace("/var/lib/sr-assets", str(home))
    (project / "profiles.yml").write_text(profile)
    (project / "models" / "silent_nodes.sql").write_text(documented("sql dbt"))
    sources = printed(sys.executable, "-m", "sr_assets", "schema", "tables", "--format", "dbt", cwd=project)
    (project / "models" / "sources.yml").write_text(sources)
    printed(programs / "dbt", "run", "--profiles-dir", ".", cwd=project, DBT_SEND_ANONYMOUS_USAGE_STATS="false")
    script = "import duckdb; print(duckdb.connect('reports.duckdb').execute('SELECT name, node FROM silent_nodes').fetchall())"
    assert printed(programs / "python", "-c", script, cwd=project) == "[('london', 'web2')]\n"


def test_sqlalchemy_reads_the_tables(programs: Path, home: Path, tmp_path: Path) -> None:
    script = f"""
import sqlalchemy
engine = sqlalchemy.create_engine("duckdb:///{home}/fleet.duckdb", connect_args={{"read_only": True}})
with engine.connect() as connection:
    print(connection.execute(sqlalchemy.text("SELECT node FROM last_seen_nodes ORDER BY node")).fetchall())
"""
    assert printed(programs / "python", "-c", script, cwd=tmp_path) == "[('web1',), ('web2',)]\n"


def test_notebook_without_widgets_reads_the_tables(programs: Path, home: Path, tmp_path: Path) -> None:
    script = f"""
import nbclient, nbformat
cell = nbformat.v4.new_code_cell("import sr_assets; sr_assets.read('last_seen_nodes', home='{home}')['node'].to_list()")
notebook = nbformat.v4.new_notebook(cells=[cell])
nbclient.NotebookClient(notebook, kernel_name="python3").execute()
print(notebook.cells[0].outputs[0]["data"]["text/plain"])
"""
    assert printed(programs / "python", "-c", script, cwd=tmp_path) == "['web1', 'web2']\n"
