"""Asset keys, and the parts of an asset's spec that several modules share: owners, links to the documents, columns."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import dagster as dg

from sr_assets.assets.table_columns import table_schema
from sr_assets.domain.foreign_text import markdown
from sr_assets.settings import Entry, Settings, asset_name

OWNERS: Final = ["team:fleet-platform"]
ROW_COUNT: Final = "dagster/row_count"


def site_job_name(site: str) -> str:
    return f"{asset_name(site)}_replication"


def stream_key(entry: Entry, noun: str) -> dg.AssetKey:
    """Return the key `[name, stream, noun]`."""
    return dg.AssetKey([*entry.asset_prefix, noun])


def topology_key(cluster: str, stream: str) -> dg.AssetKey:
    """Return the key of a native stream on a cluster of `topology`."""
    return dg.AssetKey(["topology", asset_name(cluster), asset_name(stream)])


def table_key(table: str) -> dg.AssetKey:
    """Return the key `["fleet", table]`."""
    return dg.AssetKey(["fleet", table])


def native_keys(settings: Settings, entry: Entry | None = None) -> list[dg.AssetKey]:
    """Return the keys of all native streams, or of the native stream that an entry reads."""
    if settings.topology is None:
        return []
    source = settings.topology.cluster_of(entry.source) if entry is not None else None
    return [
        topology_key(wanted.cluster, wanted.stream)
        for wanted in settings.topology.streams
        if entry is None or (source is not None and (wanted.cluster, wanted.stream) == (source.name, entry.stream))
    ]


def documented(text: str, section: str) -> str:
    """Return a description with a link to the section of `docs/` that explains the asset; `sr-assets up` serves it."""
    return f"{text} See [docs/{section.partition('#')[0]}](/docs/{section})."


def column_metadata(table: str) -> dict[str, Any]:
    """Return the columns of a table as Dagster shows them.

    A shared table has them in its spec. The assets of a site and native streams have them in each materialisation: in
    the specs of hundreds of sites they would make loading slow.
    """
    return {"dagster/column_schema": table_schema(table)}


def source_spec(settings: Settings, entry: Entry, description: str) -> dg.AssetSpec:
    """Describe the stream that an entry reads; others write it, or the servers do if it is a native stream."""
    return dg.AssetSpec(
        stream_key(entry, "source"),
        deps=native_keys(settings, entry),
        description=documented(description, "architecture.md#the-path-of-a-message"),
        group_name=entry.asset_prefix[0],
        kinds={"nats"},
        owners=OWNERS,
    )


def entry_spec(
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
        stream_key(entry, noun),
        deps=[stream_key(entry, dep) if isinstance(dep, str) else dep for dep in deps],
        description=documented(text, section),
        group_name=entry.asset_prefix[0],
        kinds=kinds,
        owners=OWNERS,
        skippable=True,
        freshness_policy=freshness,
    )


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> dg.MarkdownMetadataValue:
    """Return a table for an asset's page; a cell may contain any text."""
    lines = [header, ["---"] * len(header), *([markdown(text) for text in row] for row in rows)]
    return dg.MetadataValue.md("\n".join(f"| {' | '.join(line)} |" for line in lines))
