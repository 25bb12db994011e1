"""Parts of queries about the rules of operators: classes, flapping nodes, unannounced silences, by published table."""

from typing import Final

#: The number of nodes of each class at the sites of this installation, as text; sites without classes have no row.
CLASS_COUNTS: Final = """
    SELECT name, stream, string_agg(class || ' ' || nodes, ', ' ORDER BY class) AS classes FROM (
        SELECT name, stream, class, count(*) AS nodes FROM node_availability
        WHERE class IS NOT NULL AND status <> 'retired' GROUP BY ALL)
    GROUP BY ALL
    """
#: The last event of each node that has flapped.
FLAPS: Final = """
    SELECT name, stream, node, arg_max(event, event_time) = 'flapping' AS flapping FROM node_events
    WHERE event <> 'unretired' GROUP BY ALL
    """
#: The outage or window that holds back the announcement of a node's present silence.
WITHHELD: Final = """
    SELECT name, stream, node, if(event = 'timeout', event, 'retired') AS status, event_time AS since,
        coalesce(held_by, suppressed_by) AS withheld_by, held_by IS NOT NULL AS held
    FROM node_advisories WHERE announced_at IS NULL AND coalesce(held_by, suppressed_by) IS NOT NULL
        AND event IN ('timeout', 'expire') AND undone_at IS NULL
    """
#: The number of flapping nodes and of unannounced silent nodes at the sites of this installation.
RULE_COUNTS: Final = f"""
    SELECT a.name, a.stream, count(*) FILTER (f.flapping) AS flapping, count(*) FILTER (w.held) AS held,
        count(*) FILTER (NOT w.held) AS suppressed
    FROM node_availability AS a LEFT JOIN ({FLAPS}) AS f USING (name, stream, node)
    LEFT JOIN ({WITHHELD}) AS w ON (w.name, w.stream, w.node, w.since, w.status)
            = (a.name, a.stream, a.node, a.status_since, a.status)
    WHERE f.flapping OR w.held IS NOT NULL GROUP BY ALL
    """
