"""The block `lake` of a stream: the folder of its partitioned files, and how Spark writes them."""

import re
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

from sr_assets.settings.blocks import spark_options
from sr_assets.settings.mapping import Block, file_key
from sr_assets.settings.values import Value, as_list, choice, read_path, read_text, shown

Column = Literal["date", "sender", "subject"]
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
#: Options of Spark's writers that would move the files or the checkpoint away from `path`.
_RESERVED: Final = ("path", "checkpointlocation")


def _lake_path(value: object) -> str:
    """Read the path of a lake: a folder, or a URL of Spark's file systems."""
    text = read_text(value).rstrip("/")
    if re.match(r"[^/]*://[^/@]*:[^/@]*@", text):
        raise ValueError("contains a login; set it in spark.config, such as spark.hadoop.fs.s3a.secret.key")
    if not text or re.search(r"[*?\[\]{}]", text):
        raise ValueError(
            f"{shown(value)} is not a folder for a lake; use a path without wildcards, or s3a://bucket/folder"
        )
    return text if _SCHEME.match(text) else str(read_path(text))


def _format(value: object) -> str:
    text = read_text(value).lower()
    if not re.fullmatch(r"[a-z][a-z0-9_]*", text):
        raise ValueError(f"{shown(value)} is not a format; use parquet, orc, json, or another format of the session")
    return text


def _columns(value: object) -> object:
    columns = as_list(value)
    assert isinstance(columns, list)
    for column in columns:
        if columns.count(column) > 1:
            raise ValueError(f"names {shown(column)} twice; remove one")
    return columns


def _options(value: object) -> dict[str, str]:
    options = spark_options(value)
    for name in options:
        if name.lower() in _RESERVED:
            raise ValueError(f"{name}: is fixed by the lake's path; remove it")
    return options


class LakeSettings(Block):
    """`lake` of a stream."""

    path: Annotated[str, Value(_lake_path, type="path or URL")] = file_key(
        "the folder of the files and of their checkpoint, relative to the home, or a URL such as `s3a://bucket/nodes`"
    )
    format: Annotated[str, Value(_format)] = file_key("a sink format of the Spark session", "parquet")
    partition_by: Annotated[
        tuple[Annotated[Column, choice(Column)], ...],
        Value(_columns, type=f"{', '.join(f'`{name}`' for name in get_args(Column))}, or a list of them"),
    ] = file_key("the columns of the folders; `[]`: none", "date")
    options: Annotated[dict[str, str], Value(_options, type="mapping")] = file_key(
        "options of the writer, such as `compression: zstd`", {}, default_text="none"
    )

    def location(self, home: Path) -> str:
        """Return the absolute path, or the URL, of the folder."""
        return self.path if _SCHEME.match(self.path) else str(home / self.path)
