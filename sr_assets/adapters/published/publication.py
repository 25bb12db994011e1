"""A site's publication: `published/name=…/publication.json`, which names its Parquet files."""

import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from sr_assets.adapters.home import OtherSchemaError
from sr_assets.adapters.private import share_as_folder, write_private
from sr_assets.adapters.published.tables import SCHEMA_VERSION, TABLES, TOPOLOGY_TABLES

#: Folder of the home with a folder of files for each site.
FOLDER: Final = "published"
_NAME: Final = "publication.json"
#: The names of the files of a publication, as patterns for `remove_files`.
FILES: Final = (f"*-{'[0-9a-f]' * 32}.parquet", _NAME, f".{_NAME}.*")
#: A checksum of the tables' columns and growth: the next run writes a publication of others again.
COLUMNS: Final = zlib.crc32(
    repr([(name, table.kinds, table.growth) for name, table in (TABLES | TOPOLOGY_TABLES).items()]).encode()
)


class BaseFile(NamedTuple):
    """The base file of an incremental table: its rows before `until_ns`.

    `mark` is the sum of the marks of its rows. `written` counts the rows of all delta files so far. `since` comes from
    the publication that wrote the file.
    """

    file: str
    rows: int
    mark: int
    until_ns: int
    written: int = 0
    since: int = 0


@dataclass(frozen=True, slots=True)
class Publication:
    """A site's last publication; its files never change.

    `since` is the number of the last `fleet.duckdb` before it. `files` has, by table, the size of each file in the
    site's folder; a table without rows has none. `history` lists the files of the Parquet history, relative to the
    home, that hold a node's newest message.

    For an incremental table, `earlier` is its base file, one of `files`; `later` are files whose rows replace others by
    key. `kept` are files of earlier publications whose rows have not changed, each with the `since` of the publication
    that wrote it. `replaced` are remaining files of earlier publications. Each has the numbers of the first and the last
    `fleet.duckdb` that may show it; the last one is None as long as it is open-ended.
    """

    site: str
    token: str
    since: int
    files: dict[str, dict[str, int]]
    history: list[str]
    later: dict[str, dict[str, int]] = field(default_factory=dict)
    earlier: dict[str, BaseFile] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    replaced: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION
    columns: int = COLUMNS

    def content(self, table: str) -> tuple[dict[str, int], dict[str, int], BaseFile | None]:
        """Return the files of a table, the files whose rows replace others, and its base file."""
        return self.files.get(table, {}), self.later.get(table, {}), self.earlier.get(table)

    def keep(self, table: str, before: "Publication") -> None:
        """Take over the files of a table from an earlier publication."""
        for kind, earlier in ((self.files, before.files), (self.later, before.later)):
            if table in earlier:
                kind[table] = earlier[table]
                self.kept.update((name, before.kept.get(name, before.since)) for name in earlier[table])
        if table in before.earlier:
            self.earlier[table] = before.earlier[table]

    @property
    def names(self) -> set[str]:
        return set(self.sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each of its files, by name."""
        return {
            name: size for kind in (self.files, self.later) for files in kind.values() for name, size in files.items()
        }


def site_folder(site: str) -> str:
    """Return the folder of a site's published files, relative to the home."""
    return f"{FOLDER}/name={quote(site, safe='')}"


def publication_folder(home: Path, site: str) -> Path:
    """Return the folder of a site's published files."""
    return home / site_folder(site)


def site_folders(home: Path) -> Iterator[tuple[str, Path]]:
    """Yield each site that has a folder of published files, and the folder."""
    for folder in (home / FOLDER).glob("name=*"):
        yield unquote(folder.name.removeprefix("name=")), folder


def file_name(table: str, token: str) -> str:
    return f"{table}-{token}.parquet"


def read_publication(folder: Path, *, other_columns: bool = False) -> Publication | None:
    """Return a site's publication, or None if it is missing, incomplete, or, unless allowed, of other columns.

    A version of sr-assets with fewer or more columns may have written it. Raises OtherSchemaError if one with other tables did.
    """
    file = folder / _NAME
    try:
        content = json.loads(file.read_text())
        version = content["schema_version"]
        if version != SCHEMA_VERSION:
            raise OtherSchemaError(file, version)
        if content.get("columns") != COLUMNS and not other_columns:
            return None
        publication = Publication(**content)
        # After a power failure, a file may exist without its content.
        at = str(folder)
        if any(os.stat(f"{at}/{name}").st_size != size for name, size in publication.sizes.items()):  # noqa: PTH116  quick
            return None
        publication.earlier.update({table: BaseFile(*earlier) for table, earlier in publication.earlier.items()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return publication


def write_publication(folder: Path, publication: Publication, before: Publication | None) -> Publication:
    """Replace a site's publication; return it with the files of `before` that remain to be deleted."""
    replaced: dict[str, tuple[int, int | None]] = {}
    if before is not None:
        for name, (first, last) in before.replaced.items():
            # An index that is written concurrently has the next number.
            replaced[name] = (first, publication.since + 1 if last is None else last)
        since = before.kept | {base.file: base.since for base in before.earlier.values()}
        replaced |= {name: (since.get(name, before.since) + 1, None) for name in before.names}
    needed = publication.names
    remaining = {name: numbers for name, numbers in replaced.items() if name not in needed and (folder / name).exists()}
    written = replace(publication, replaced=remaining)
    write_private(folder / _NAME, json.dumps(asdict(written)))
    share_as_folder(folder / _NAME)
    return written


def sweep(folder: Path, publication: Publication, opened: Iterable[int]) -> None:
    """Delete a site's files that neither its publication nor an open older file needs.

    `opened` are the numbers of each `fleet.duckdb` that may be open. Files of an interrupted publication belong to no
    number.
    """
    opened, needed = list(opened), publication.names
    for file in folder.iterdir():
        if file.name in needed or file.name == _NAME or not fnmatch(file.name, FILES[0]):
            continue
        first, last = publication.replaced.get(file.name, (0, -1))
        if not any(first <= number and (last is None or number <= last) for number in opened):
            file.unlink(missing_ok=True)
