"""Files of other owners in a home: no run, job or command deletes them."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from sr_assets.adapters import control
from sr_assets.adapters.state.orders import give_order, take_order
from sr_assets.adapters.wire import Connection, Outgoing, Publisher
from sr_assets.definitions import build
from sr_assets.operate.instance import open_instance, prepare_instance, prepare_storage
from sr_assets.settings import Settings, load_settings
from sr_assets.stages.forgetting import SCRATCH
from sr_assets_tests.operate.rig import run
from sr_assets_tests.rig import Command

#: Names like those of our own files, for each folder of the home.
NAMES = (
    "notes.txt",
    ".hidden",
    ".draft.parquet",
    "report.parquet",
    "2026-report.parquet",
    "abcd-ef-gh.parquet",
    "data.json",
    "other.duckdb",
    "11111111-2222-3333-4444-555555555555/their.txt",
    "folder/their.parquet",
)


def folders(home: Path) -> Iterator[Path]:
    """Yield the folders of a home, without those of a warm engine and of unfinished work."""
    for path in (home, *home.rglob("*")):
        if path.is_dir() and not {"spark", *SCRATCH} & {*path.relative_to(home).parts}:
            yield path


def plant(home: Path) -> dict[Path, str]:
    """Write a file of another owner under each name into each folder of a home; return their contents."""
    planted = {}
    for folder in [*folders(home)]:
        # The views read every Parquet file of these folders.
        viewed = {"snapshots", "availability", "inventory", "actions"} & {*folder.relative_to(home).parts}
        for name in NAMES:
            file = folder / name
            if file.exists() or (viewed and file.suffix == ".parquet"):
                continue
            file.parent.mkdir(exist_ok=True)
            planted[file] = f"somebody's {file}"
            file.write_text(planted[file])
            os.utime(file, (time.time() - 400 * 86_400,) * 2)
    return planted


def publish(settings: Settings, nodes: int) -> None:
    """Publish a message of some nodes into the first stream."""
    stream = settings.streams[0]
    messages = [Outgoing(n, f"{stream.stream}.m", b"", f'{{"sender": "n{n}"}}'.encode()) for n in range(1, nodes + 1)]
    with Connection(stream.source, "test") as opened:
        acknowledged = list(Publisher(opened).publish_all(messages))
    assert not [ack for ack in acknowledged if ack.error]


@pytest.fixture
def command(command: Command) -> Command:
    """The command in this process, but `run` in a process whose children need not import the platform."""

    def carried_out(*arguments: str) -> tuple[int, str, str]:
        if arguments[0] != "run":
            return command(*arguments)
        ended = run(*arguments[1:], due_work=True)
        return ended.returncode, ended.stdout, ended.stderr

    return carried_out


@pytest.fixture
def tracked(platform: Settings) -> Settings:
    """The settings of two sites; the first one tracks a stream with messages."""
    file = Path(os.environ["SR_ASSETS_CONFIG"])
    document = yaml.safe_load(file.read_text())
    document["streams"][0] |= {"inspect_field": "sender", "inspect_duration": "1h"}
    file.write_text(yaml.safe_dump(document))
    settings = load_settings()
    publish(settings, 3)
    return settings


def test_no_command_and_no_job_deletes_files_of_others(tracked: Settings, command: Command) -> None:
    # Tables, history and the Dagster instance.
    assert command("run", "--once")[0] == 0
    planted = plant(tracked.home)
    publish(tracked, 5)
    file = Path(os.environ["SR_ASSETS_CONFIG"])
    site = tracked.streams[0].name
    assert site is not None
    for arguments in (
        ("run", "--once"),
        ("pause", "--stream", tracked.streams[1].stream),
        ("resume", "--stream", tracked.streams[1].stream),
        ("retire", "n1"),
        ("unretire", "n1"),
        ("maintenance", "add", "--match", "*", "--for", "1h", "--reason", "x"),
        ("checkpoint", "--site", site, "-o", str(file.with_name("checkpoint.zip"))),
        ("restore", "--site", site, str(file.with_name("checkpoint.zip"))),
        ("recover", "--stream", tracked.streams[0].stream, "--force"),
        ("run", "--once"),
        ("nodes",),
        ("query", "SELECT 1"),
        ("spark", "stop"),
    ):
        code, _, errors = command(*arguments)
        assert (code, errors.count("error:")) == (0, 0), (arguments, errors)
    prepare_storage(prepare_instance(tracked))
    with open_instance() as instance:
        assert build(tracked).resolve_job_def("retention").execute_in_process(instance=instance).success
    document = yaml.safe_load(file.read_text())
    del document["streams"][0]
    file.write_text(yaml.safe_dump(document))
    for arguments in (("run", "--once"), ("forget", "--site", site), ("run", "--once"), ("run", "--once")):
        code, _, errors = command(*arguments)
        assert code == 0, (arguments, errors)
    assert [file for file, text in planted.items() if not file.exists() or file.read_text() != text] == []


def test_forgotten_site_leaves_no_file_of_ours(tracked: Settings, command: Command) -> None:
    assert run("--once").returncode == 0
    file = Path(os.environ["SR_ASSETS_CONFIG"])
    site = tracked.streams[0].name
    assert site is not None
    for arguments in (("pause", "--stream", f"{site}/{tracked.streams[0].stream}"), ("retire", "n1")):
        assert command(*arguments)[0] == 0
    document = yaml.safe_load(file.read_text())
    del document["streams"][0]
    file.write_text(yaml.safe_dump(document))
    # As after a killed checkpoint.
    give_order(tracked.home / "sites" / site, "checkpoint")
    assert take_order(tracked.home / "sites" / site, "checkpoint")
    assert command("forget", "--site", site)[0] == 0
    assert not (tracked.home / "sites" / site).exists()
    tables = [
        name for (name,) in control.query(tracked.home, "SELECT name FROM sqlite_schema WHERE sql LIKE '%site TEXT%'")
    ]
    assert len(tables) > 5
    rows = {name: control.query(tracked.home, f"SELECT * FROM {name} WHERE site = ?", site) for name in tables}
    assert not any(rows.values()), rows
    assert not [path for path in (tracked.home / "snapshots").rglob("*") if site in path.name]
