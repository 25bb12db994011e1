"""The commands `maintenance add`, `maintenance list` and `maintenance end`, and windows in `nodes` and on the page."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from sr_assets.adapters import control
from sr_assets.adapters.state.checkpoint import read_about
from sr_assets.adapters.state.operator_settings import added_windows
from sr_assets.adapters.state.status_file import SiteStatus, read_status, write_status
from sr_assets.adapters.state.store import SiteState
from sr_assets.settings import load_settings
from sr_assets.stages.checkpointing import export_state, restore_site
from sr_assets_tests.rig import Command
from sr_assets_tests.test_cli import configuration, write_configuration

ADD = ("maintenance", "add", "--match", "web*", "--reason", "new switches")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def run(command: Command, tmp_path: Path, home: Path) -> Run:
    file = write_configuration(tmp_path, configuration(home))
    return partial(command, "--config", str(file))


def listed(run: Run) -> list[dict[str, object]]:
    code, out, _ = run("maintenance", "list", "--format", "json")
    assert code == 0
    return list(json.loads(out))


def test_added_window_is_listed_and_recorded_until_it_is_ended(run: Run, home: Path) -> None:
    code, out, _ = run(*ADD, "--for", "2h")
    assert code == 0
    window_id = out.strip()
    (row,) = listed(run)
    shown = {key: row[key] for key in ("id", "state", "match", "site", "cron", "reason", "added")}
    assert shown == {
        "id": window_id, "state": "active", "match": "web*", "site": "london", "cron": None, "reason": "new switches",
        "added": True,
    }  # fmt: skip
    (home / "sites" / "london").mkdir(parents=True)
    write_status(home / "sites" / "london", SiteStatus())
    assert run("maintenance", "end", window_id)[0] == 0
    assert read_status(home / "sites" / "london").is_outdated
    assert [row["state"] for row in listed(run)] == ["over"]
    actions = [json.loads(line) for line in (home / "actions" / "actions.jsonl").read_text().splitlines()]
    assert [(row["action"], row["subject"]) for row in actions] == [
        ("maintenance add", "london"),
        ("maintenance end", "london"),
    ]
    assert all(window_id in row["detail"] for row in actions)


def test_configured_windows_are_listed_and_not_ended(command: Command, tmp_path: Path, home: Path) -> None:
    text = configuration(home) + "maintenance: [{match: db*, cron: '0 2 * * 6', for: 90m, reason: updates}]\n"
    file = write_configuration(tmp_path, text)
    run = partial(command, "--config", str(file))
    (row,) = listed(run)
    assert (row["match"], row["cron"], row["for"], row["added"]) == ("db*", "0 2 * * 6", "1h30m", False)
    code, _, err = run("maintenance", "end", str(row["id"]))
    assert (code, err) == (2, f"error: window '{row['id']}' is configured; remove it from the key maintenance\n")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    (
        (
            ("--from", "2026-03-02T00:00:00Z", "--to", "2026-03-01T00:00:00Z"),
            "--to 2026-03-01T00:00:00Z: is not after --from",
        ),
        (("--for", "1h", "--to", "2026-03-01T00:00:00Z"), "needs one of --to and --for"),
        ((), "needs one of --to and --for"),
        (
            ("--for", "1h", "--site", "lonndon"),
            "--site lonndon: matches no site that tracks nodes; did you mean 'london'?",
        ),
        (("--to", "tomorrow"), "'tomorrow' is not a time"),
        (("--for", "1h", "--class", "web"), "--class 'web' is not a class of these streams; add it to classes"),
    ),
)
def test_add_refuses_a_window_in_one_line(run: Run, arguments: tuple[str, ...], problem: str) -> None:
    code, out, err = run(*ADD, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert problem in err
    assert listed(run) == []


def test_window_of_a_class_is_listed_with_it(command: Command, tmp_path: Path, home: Path) -> None:
    text = configuration(home).replace(
        "inspect_duration:", "classes: [{name: web, match: 'web*'}]\n    inspect_duration:", 1
    )
    run = partial(command, "--config", str(write_configuration(tmp_path, text)))
    code, _, err = run("maintenance", "add", "--class", "wbe", "--for", "1h", "--reason", "r")
    assert (code, err) == (
        2,
        "error: --class 'wbe' is not a class of these streams; did you mean 'web'? classes: web\n",
    )
    assert run("maintenance", "add", "--class", "web", "--for", "1h", "--reason", "r")[0] == 0
    assert [(row["match"], row["class"]) for row in listed(run)] == [("*", "web")]
    code, _, err = run("maintenance", "add", "--for", "1h", "--reason", "r")
    assert (code, err) == (2, "error: maintenance add: needs --match or --class; --match '*' is every node\n")


def test_end_refuses_an_unknown_window(run: Run) -> None:
    code, _, err = run("maintenance", "end", "none")
    assert (code, err) == (2, "error: window 'none' is unknown; `sr-assets maintenance list` shows the ids\n")


def test_checkpoint_contains_the_added_windows(run: Run, tmp_path: Path, home: Path) -> None:
    window_id = run(*ADD, "--for", "2h")[1].strip()
    settings = load_settings(tmp_path / "replication.yaml", {})
    folder, file = home / "sites" / "london", tmp_path / "checkpoint.zip"
    with SiteState(folder) as state:
        export_state(settings, "london", state, file)
    assert [row["id"] for row in read_about(file, "US-EAST", "london").maintenance] == [window_id]
    windows = added_windows(folder)
    control.change(home, "DELETE FROM windows")
    restore_site(settings, "london", file)
    assert added_windows(folder) == windows
