"""Files of the Parquet history that compaction has merged into others: whether a reader may still read them."""

from collections.abc import Sequence
from pathlib import Path

from pyarrow import parquet

from sr_assets.adapters.published.manifest import earlier_file, is_open, read_manifest, shows
from sr_assets.adapters.published.publication import Publication, publication_folder, read_publication


def unread_files(home: Path, site: str, files: Sequence[str]) -> list[str]:
    """Return the files, relative to the home, that no view names: neither the current one nor one that is open.

    A view names no file that was written after it.
    """
    folder, manifest = publication_folder(home, site), read_manifest(home)
    publication = read_publication(folder)
    if publication is None or not shows(home, site, publication.token, manifest):
        return []
    written_ns: list[int] = []
    for number in manifest.numbers:
        link = earlier_file(home, number)
        if number == manifest.number:
            continue
        try:
            if is_open(link):
                written_ns.append(link.stat().st_mtime_ns)
        except FileNotFoundError:
            # The disk has no hard links, so it is unknown whether the file is open.
            return []
    shown = _shown_files(folder, publication)
    return [file for file in files if file not in shown and _is_later(home / file, written_ns)]


def _shown_files(folder: Path, publication: Publication) -> set[str]:
    shown = set(publication.history)
    for name in publication.files.get("history_files", ()):
        shown.update(parquet.read_table(folder / name, columns=["file"], partitioning=None)["file"].to_pylist())
    return shown


def _is_later(file: Path, written_ns: Sequence[int]) -> bool:
    return not written_ns or not file.exists() or file.stat().st_mtime_ns > max(written_ns)
