"""Paused streams: concurrent commands, and a store that cannot be used."""

import multiprocessing
from pathlib import Path

import pytest

from sr_assets.adapters.state.operator_settings import paused_streams, set_paused
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


def test_unusable_store_is_an_error_that_names_it(settings: Settings) -> None:
    (settings.home / "control.db").write_text("damaged" * 200)
    for attempt in (
        lambda: paused_streams(folder_of(settings)),
        lambda: set_paused(settings, settings.streams[0], True),
    ):
        with pytest.raises(RunError, match=r"control\.db cannot be read"):
            attempt()


def test_unwritable_store_is_an_error_that_names_it(settings: Settings) -> None:
    (settings.home / "control.db").mkdir()
    with pytest.raises(RunError, match=r"control\.db cannot be written"):
        set_paused(settings, settings.streams[0], paused=True)
