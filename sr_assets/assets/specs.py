"""Asset keys, names of jobs, and the parts of an asset's spec that several modules share."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import dagster as dg

from sr_assets.adapters.published.catalog import columns_of
from sr_assets.domain.foreign_text import markdown
from sr_assets.settings import Entry, Settings, asset_name

ROW_COUNT: Final = "dagster/row_count"
#: Dagster's longest kind.
_LONGEST_KIND: Final = 63
#: Dagster's tag of the data version in a materialization that is an event.
DATA_VERSION_TAG: Final = "dagster/data_version"


def site_job_name(settings: Settings, site: str) -> str:
    return settings.dagster.name(f"{asset_name(site)}_replication")


def stream_key(settings: Settings, entry: Entry, noun: str) -> dg.AssetKey:
    """Return the key `[name, stream, noun]`, after the prefix of this deployment, as all keys."""
    return dg.AssetKey([*settings.dagster.key_prefix, *entry.asset_prefix, noun])


def entry_path(key: dg.AssetKey) -> list[str]:
    """Return the `asset_prefix` of the entry to which an asset of a site belongs."""
    return list(key.path[-3:-1])


def topology_key(settings: Settings, cluster: str, stream: str) -> dg.AssetKey:
    """Return the key `["topology", cluster, stream]` of a native stream on a cluster of `topology`."""
    return dg.AssetKey([*settings.dagster.key_prefix, "topology", asset_name(cluster), asset_name(stream)])


def table_key(settings: Settings, table: str) -> dg.AssetKey:
    """Return the key `["fleet", table]`."""
    return dg.AssetKey([*settings.dagster.key_prefix, "fleet", table])


def table_io_manager(settings: Settings) -> str:
    """Return the key of the resource that gives the shared tables to assets as inputs."""
    return settings.dagster.resource("fleet_tables_io_manager")


def native_keys(settings: Settings, entry: Entry | None = None) -> list[dg.AssetKey]:
    """Return the keys of all native streams, or of the native stream that an entry reads."""
    if settings.topology is None:
        return []
    source = settings.topology.cluster_of(entry.source) if entry is not None else None
    return [
        topology_key(settings, wanted.cluster, wanted.stream)
        for wanted in settings.topology.streams
        if entry is None or (source is not None and (wanted.cluster, wanted.stream) == (source.name, entry.stream))
    ]


def common_spec(
    settings: Settings,
    group: str,
    kinds: Iterable[str],
    text: str,
    section: str,
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what each asset has: its group, kinds and owners, its description, and `metadata` with a code reference.

    The description is `text` with a link to the `section` of `docs/` that explains the asset. The reference is the
    configuration's file.
    """
    deployment = settings.dagster
    folder = deployment.documents or ("" if deployment.guest else "/docs")
    page = f"docs/{section.partition('#')[0]}"
    references = _code_references(str(settings.loaded.path.absolute())) if settings.loaded else {}
    return {
        "group_name": deployment.group(group),
        "kinds": {*kinds, *deployment.kinds},
        "owners": list(deployment.owners),
        "description": f"{text} See [{page}]({folder}/{section})." if folder else text,
        "metadata": {**(metadata or {}), **references},
    }


@cache
def _code_references(file: str) -> dict[str, Any]:
    with beta_allowed():
        written = dg.LocalFileCodeReference(file_path=file, label="configuration")
        return {"dagster/code_references": dg.CodeReferencesMetadataValue(code_references=[written])}


def materialized(key: dg.AssetKey, metadata: Mapping[str, Any], version: str) -> dg.MaterializeResult[None]:
    """Return the result of a planned asset, with its data version."""
    with beta_allowed():
        return dg.MaterializeResult(key, metadata=metadata, data_version=dg.DataVersion(version))


def recorded(key: dg.AssetKey, metadata: Mapping[str, Any], version: str) -> dg.AssetMaterialization:
    """Return a materialization that a run has not planned, with its data version, as an event."""
    return dg.AssetMaterialization(key, metadata=metadata, tags={DATA_VERSION_TAG: version})


@contextmanager
def beta_allowed() -> Iterator[None]:
    """Silence Dagster's warnings that a class or parameter may change: its version is limited, and tests use it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        yield


def column_metadata(table: str) -> dict[str, Any]:
    """Return the columns of a table as Dagster shows them.

    A shared table has them in its spec. The assets of a site and native streams have them in each materialisation: in
    the specs of hundreds of sites they would make loading slow.
    """
    columns = [dg.TableColumn(name, kind, description) for name, kind, description in columns_of(table)]
    return {"dagster/column_schema": dg.TableSchema(columns)}


def has_source(settings: Settings, entry: Entry) -> bool:
    """Return whether an entry has an asset `source`; replicas of this platform may fill the stream that a feed reads."""
    return entry.kind != "feed" or not settings.copied_into(entry)


def _stream_kind(entry: Entry) -> str:
    """Return the stream as a kind: the graph shows an asset's kinds, and of its key the last part alone."""
    return entry.asset_prefix[1][:_LONGEST_KIND]


def source_spec(settings: Settings, entry: Entry, description: str) -> dg.AssetSpec:
    """Describe the stream that an entry reads; others write it, or the servers do if it is a native stream."""
    return dg.AssetSpec(
        stream_key(settings, entry, "source"),
        deps=native_keys(settings, entry),
        **common_spec(
            settings,
            entry.asset_prefix[0],
            {"nats", _stream_kind(entry)},
            description,
            "architecture.md#the-path-of-a-message",
        ),
    )


def entry_spec(
    settings: Settings,
    entry: Entry,
    noun: str,
    deps: Iterable[str | dg.AssetKey],
    text: str,
    section: str,
    *,
    kinds: set[str],
    freshness: dg.FreshnessPolicy | None = None,
) -> dg.AssetSpec:
    """Describe an asset that a site's run materialises; a run leaves it out if the stream fails.

    `deps` are keys, or nouns of the same entry. The description is `text` with a link to a section of `docs/`.
    """
    return dg.AssetSpec(
        stream_key(settings, entry, noun),
        deps=[stream_key(settings, entry, dep) if isinstance(dep, str) else dep for dep in deps],
        skippable=True,
        freshness_policy=freshness,
        **common_spec(settings, entry.asset_prefix[0], {*kinds, _stream_kind(entry)}, text, section),
    )


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> dg.MarkdownMetadataValue:
    """Return a table for an asset's page; a cell may contain any text."""
    lines = [header, ["---"] * len(header), *([markdown(text) for text in row] for row in rows)]
    return dg.MetadataValue.md("\n".join(f"| {' | '.join(line)} |" for line in lines))
