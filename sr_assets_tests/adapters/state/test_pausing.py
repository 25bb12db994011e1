"""The marker of paused streams: its content, concurrent writers, and a damaged marker."""

import json
import multiprocessing
from pathlib import Path

import pytest

from sr_assets.adapters.state.pausing import paused_streams, set_paused
from sr_assets.domain.errors import RunError
from sr_assets.settings import Settings, load_settings

STREAMS = [f"S{number}" for number in range(8)]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return configured(tmp_path)


def configured(home: Path) -> Settings:
    entries = "".join(f"  - {{stream: {stream}, source_url: a, target_url: b}}\n" for stream in STREAMS)
    file = home / "replication.yaml"
    file.write_text(f"name: LONDON\nstate_store: {home}\nstreams:\n{entries}")
    return load_settings(file, {})


def folder_of(settings: Settings) -> Path:
    return settings.home / "sites" / "LONDON"


def test_paused_streams_is_empty_without_a_folder(settings: Settings) -> None:
    assert paused_streams(folder_of(settings)) == frozenset()
    assert not folder_of(settings).exists()


def test_set_paused_returns_whether_it_changed_anything(settings: Settings) -> None:
    first, second = settings.streams[:2]
    assert set_paused(settings, first, paused=True)
    assert not set_paused(settings, first, paused=True)
    assert set_paused(settings, second, paused=True)
    assert paused_streams(folder_of(settings)) == {"S0", "S1"}
    assert set_paused(settings, first, paused=False)
    assert not set_paused(settings, first, paused=False)
    assert paused_streams(folder_of(settings)) == {"S1"}


def pause(home: Path, index: int) -> None:
    settings = load_settings(home / "replication.yaml", {})
    set_paused(settings, settings.streams[index], paused=True)


@pytest.mark.process
def test_concurrent_processes_can_pause_different_streams(settings: Settings) -> None:
    home = settings.home
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        pool.starmap(pause, [(home, index) for index in range(len(STREAMS))], chunksize=1)
    assert paused_streams(folder_of(settings)) == set(STREAMS)


@pytest.mark.parametrize("text", ("", "[]", '{"streams": 1}', "{"))
def test_damaged_marker_is_an_error_that_names_the_file(settings: Settings, text: str) -> None:
    folder = folder_of(settings)
    folder.mkdir(parents=True)
    (folder / "paused.json").write_text(text)
    with pytest.raises(RunError, match=r"paused\.json cannot be read"):
        paused_streams(folder)
    with pytest.raises(RunError, match=r"paused\.json cannot be read"):
        set_paused(settings, settings.streams[0], paused=True)


def test_unwritable_folder_is_an_error_that_names_the_marker(settings: Settings) -> None:
    (settings.home / "sites").write_text("a file instead of the folder")
    with pytest.raises(RunError, match=r"paused\.json"):
        set_paused(settings, settings.streams[0], paused=True)


def test_marker_is_json(settings: Settings) -> None:
    set_paused(settings, settings.streams[0], paused=True)
    assert json.loads((folder_of(settings) / "paused.json").read_text()) == {"streams": ["S0"]}
