"""Reading a table of nodes in order and in pages, because sorting ten million rows needs more memory than a query has."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import duckdb

from sr_assets.adapters.published.reading import open_fleet, start_query
from sr_assets.adapters.published.table import literal

#: Number of rows of a page: 200 MiB to sort and join them.
PAGE_ROWS: Final = 500_000
_FETCH_ROWS: Final = 2_048
#: Rows of the sample that gives the limits of a page.
_SAMPLED: Final = 100

#: The columns of a query, and its rows as they are fetched.
Fetched = tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]


@contextmanager
def read_pages(
    home: Path,
    sql: str,
    table: str,
    keys: Sequence[str],
    parameters: Mapping[str, object],
    most: int | None = None,
) -> Iterator[Fetched]:
    """Run a query for one page of a table's nodes after the other, on one publication; yield its columns and rows.

    `sql` has `{page}`, a condition on the columns `keys` and `node` that replaces it, and is ordered by these columns.
    `most` rows need no pages, because DuckDB then keeps only these. Raises the errors of `read_rows`.
    """
    with open_fleet(home, confined=True) as connection:
        pages = _pages(connection, table, keys) if most is None else ["true"]
        limited = sql if most is None else f"{sql} LIMIT {most}"
        answers = (start_query(connection, limited.format(page=page), parameters) for page in pages)
        first = next(answers)
        batches = (
            batch
            for answer in itertools.chain([first], answers)
            for batch in iter(lambda answer=answer: answer.fetch(_FETCH_ROWS), [])  # type: ignore[misc]  # no Callable
        )
        try:
            yield first.columns, itertools.chain.from_iterable(batches)
        finally:
            # DuckDB computes beyond the fetched rows, and closing would wait for it.
            connection.interrupt()


def _pages(connection: duckdb.DuckDBPyConnection, table: str, keys: Sequence[str]) -> list[str]:
    """Return conditions, at least one, that each select about `PAGE_ROWS` rows, in order of keys and node."""
    ((rows,),) = connection.execute(f"SELECT count(*) FROM {table}").fetchall()
    if rows <= PAGE_ROWS:
        return ["true"]
    columns = ", ".join(keys)
    groups = connection.execute(f"SELECT {columns}, count(*) FROM {table} GROUP BY ALL ORDER BY {columns}").fetchall()
    pages, together, size = list[str](), list[str](), 0
    for *values, count in groups:
        key = f"row({', '.join('NULL' if value is None else literal(value) for value in values)})"
        if together and size + count > PAGE_ROWS:
            pages.append(f"row({columns}) IN ({', '.join(together)})")
            together, size = [], 0
        if count > PAGE_ROWS:
            pages += _ranges(connection, table, f"row({columns}) IN ({key})", count)
        else:
            together, size = [*together, key], size + count
    return [*pages, f"row({columns}) IN ({', '.join(together)})"] if together else pages


def _ranges(connection: duckdb.DuckDBPyConnection, table: str, condition: str, count: int) -> Iterator[str]:
    """Yield conditions for ranges of the nodes of one key; a sample gives their limits."""
    number = -(-count // PAGE_ROWS)
    sample = connection.execute(
        f"SELECT node FROM (SELECT node FROM {table} WHERE {condition}) USING SAMPLE {_SAMPLED * number} ROWS"
    ).fetchall()
    nodes = sorted(node for (node,) in sample)
    limits = [literal(node) for node in dict.fromkeys(nodes[len(nodes) * part // number] for part in range(1, number))]
    for first, after in itertools.pairwise(["", *limits, ""]):
        from_first, to_after = first and f" AND node >= {first}", after and f" AND node < {after}"
        yield f"{condition}{from_first}{to_after}"
