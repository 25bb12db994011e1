"""The rows of the table in `BENCH.md`: each workload with its figure and its target."""

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

Figures = dict[str, Any]

SIZES = {"copy_512": "512 B", "copy_7k": "7 KB", "copy_64k": "64 KB"}
KINDS = {
    "ours_per_second": "sr_assets",
    "mirror_per_second": "server's mirror",
    "one_at_a_time_per_second": "one at a time",
}
KNOWN = ("tracked_10k", "tracked_100k", "tracked_1m")
#: Messages per second.
_NEW_FLEET = {"sampled_7k": 15_000}
_ENDS = {"target": "in the target", "queryable": "queryable"}


class Row(NamedTuple):
    """A workload, its figure, its target, and whether it meets the target (None without a target)."""

    workload: str
    measured: str
    target: str = ""
    met: bool | None = None


def at_most(workload: str, value: float, most: float | None, unit: str, before: str = "") -> Row:
    """Return a row whose figure should not exceed a target."""
    return _row(workload, value, most, unit, before, "≤", met=most is not None and value <= most)


def at_least(workload: str, value: float, least: float | None, unit: str) -> Row:
    """Return a row whose figure should reach a target."""
    return _row(workload, value, least, unit, "", "≥", met=least is not None and value >= least)


def _row(workload: str, value: float, target: float | None, unit: str, before: str, sign: str, *, met: bool) -> Row:
    measured = f"{before}{value:,}{unit}"
    return Row(workload, measured) if target is None else Row(workload, measured, f"{sign} {target:,}{unit}", met)


def rows(figures: Figures) -> Iterator[Row]:
    """Yield all rows."""
    return chain(
        _copy(figures),
        _cluster(figures["cluster"]),
        _free_cores(figures.get("free_cores")),
        _sampled(figures),
        _unread(figures["unread"]),
        _backlog(figures),
        _silence(figures["silence"]),
        _latency(figures["latency"]),
        _start(figures["start"]) if "start" in figures else (),
        _outage(figures),
        _trickle(figures),
        _sites(figures),
        _feeds(figures["feeds"]),
        _publication(figures["publication"]),
        _daily(figures),
        _members(figures),
        _scrape(figures["scrape"]),
        _definitions(figures["definitions"]),
        _disk(figures["disk"]),
        _history(figures["history"]),
        _commands(figures["commands"]),
    )


def _copy(figures: Figures) -> Iterator[Row]:
    for name, target in (("copy_512", 0.4), ("copy_7k", 0.45), ("copy_64k", 0.4), ("copy_512_consumer", None)):
        copy, size = figures[name], SIZES.get(name, "512 B, no direct get")
        rates = ", ".join(f"{label} {copy[kind]:,}/s" for kind, label in KINDS.items())
        workload = f"plain copy, {size}, whole run"
        yield at_least(f"{workload}, compared with the mirror ({rates})", copy["times_mirror"], target, " x")
        steady = f"the same without the costs of each run ({copy['steady_per_second']:,}/s)"
        yield at_least(steady, copy["steady_times_mirror"], None, " x")
        least = 0.5 if name == "copy_7k" else None
        workload = f"the same into a target with `persist: async` ({copy['async_per_second']:,}/s), whole run"
        yield at_least(workload, copy["async_times_mirror"], least, " x")
    links, report, workers = figures["links"], figures["report"], figures["workers"]
    for kind, label in (("mirror", "native mirror"), ("source", "native source"), ("ours", "sr_assets")):
        yield at_least(f"through a leafnode, 7 KB, {label}", links[f"{kind}_per_second"], None, "/s")
    workload = f"`report` of {report['streams']} streams and {report['links']} links on {report['clusters']} clusters"
    yield at_most(f"{workload}, as a process", report["seconds"], 2, " s")
    times = figures["copy_512"]["times_one_at_a_time"]
    yield at_least("plain copy, 512 B, compared with one at a time", times, 6, " x")
    for count in (1, 2):
        rate = workers[f"workers_{count}_per_second"]
        yield at_least(f"plain copy, 7 KB, `order: none`, workers {count}", rate, None, "/s")


def _cluster(cluster: Figures) -> Iterator[Row]:
    for kind, label in (("plain", "plain copy"), ("sampled", "sampled, a new fleet")):
        ours, local = (cluster[f"{kind}_{where}_per_second"] for where in ("cluster", "local"))
        workload = f"{label}, 7 KB, a Spark cluster of {cluster['workers']} workers, compared with this host alone"
        rates = f"cluster {ours:,}/s, this host {local:,}/s"
        yield at_least(f"{workload} ({rates})", cluster[f"{kind}_to_local"], None, " x")


def _free_cores(figures: Figures | None) -> Iterator[Row]:
    """Yield the rows of a workload that needs root."""
    if figures is None:
        return
    for kind, label in (
        ("plain", "plain copy, 900 B, two partitions"),
        ("sampled", "sampled, a new fleet, 7 KB, 10% due"),
    ):
        for distance in (0, 20):
            local, single, double = (
                figures[f"{kind}_{name}_{distance}ms_per_second"] for name in ("local", "one", "two")
            )
            where = f"{label}, slow hosts, target {distance} ms away"
            rates = f"two workers {double:,}/s, one {single:,}/s, this host {local:,}/s"
            yield at_least(f"{where}: two workers compared with one ({rates})", round(double / single, 2), None, " x")
            yield at_least(f"{where}: two workers compared with this host alone", round(double / local, 2), None, " x")


def _sampled(figures: Figures) -> Iterator[Row]:
    for name, label, target in (
        ("sampled_512", "512 B", None),
        ("sampled_7k", "7 KB", 25_000),
        ("sampled_64k", "64 KB", None),
    ):
        sampled = figures[name]
        workload = f"sampled, {label}, {sampled['copied_share']:.0%} due, {sampled['senders']:,} senders"
        rate = sampled["messages_per_second"]
        yield at_least(f"{workload}: whole run, including publication", rate, target, "/s")
        fleet = f"sampled, {label}, a new fleet of {sampled['senders']:,} senders, all due: whole run"
        yield at_least(fleet, sampled["all_new_per_second"], _NEW_FLEET.get(name), "/s")


def _unread(unread: Figures) -> Iterator[Row]:
    workload = f"{unread['messages']:,} messages of {unread['senders']:,} known senders, none due"
    for size, label in (("512", "512 B"), ("7k", "7 KB"), ("64k", "64 KB")):
        by_field, by_subject = (unread[f"{way}_{size}_per_second"] for way in ("field", "subject"))
        yield at_least(f"{workload}, {label}: by subject (by JSON field {by_field:,}/s)", by_subject, None, "/s")
    yield at_least("by subject: 64 KB compared with 512 B", unread["large_to_small"], 0.8, " x")


def _backlog(figures: Figures) -> Iterator[Row]:
    backlog = figures["backlog"]
    workload = f"{backlog['long_messages']:,} messages of 1 KB in a backlog, {backlog['senders']:,} senders"
    rates = f"({backlog['long_per_second']:,}/s), compared with a tenth ({backlog['short_per_second']:,}/s)"
    yield at_least(f"{workload} {rates}", backlog["long_to_short"], 0.8, " x")
    yield at_most(f"{workload}: peak memory of all our processes", backlog["long_peak_mib"], 2560, " MiB")
    more = round(figures["tracked_1m"]["run_seconds"] - figures["tracked_10k"]["run_seconds"], 2)
    runs = ", ".join(f"{figures[name]['nodes']:,}: {figures[name]['run_seconds']} s" for name in KNOWN)
    workload = f"run of 1,000 messages with 1 M known nodes, compared with 10,000 ({runs})"
    yield at_most(workload, more, 3, " s", "+ ")


def _silence(silence: Figures) -> Iterator[Row]:
    workload = f"{silence['nodes']:,} nodes fall silent at the same time: committed and published"
    yield at_most(workload, silence["swept_seconds"], None, " s")
    rate = round(silence["advisories"] / silence["announced_seconds"])
    yield at_least(f"their {silence['advisories']:,} advisories", rate, None, "/s")
    workload = f"peak memory, compared with a run in which no node falls silent ({silence['quiet_peak_mib']} MiB)"
    yield at_most(workload, silence["more_mib"], 300, " MiB", "+ ")


def _latency(latency: Figures) -> Iterator[Row]:
    for kind, label, targets in (
        ("lingering", "during a lingering run", {"target": 2, "queryable": 3}),
        ("sensed", "without a run, sensor at 5 s", {"target": 10, "queryable": 12}),
    ):
        for end, seconds in targets.items():
            value, slowest = (latency[f"{kind}_{end}_{figure}"] for figure in ("p50", "max"))
            workload = f"message stored → {_ENDS[end]}, {label} (slowest {slowest} s)"
            yield at_most(workload, value, seconds, " s", "p50 ")


def _start(start: Figures) -> Iterator[Row]:
    phases = f"process {start['process_seconds']} s, step {start['step_seconds']} s"
    yield at_most(f"a sensor's run: requested → first read ({phases})", start["read_seconds"], 2.5, " s", "p50 ")


def _outage(figures: Figures) -> Iterator[Row]:
    for target in ("up", "down"):
        value, slowest = (figures["transitions"][f"target_{target}_{figure}"] for figure in ("p50", "max"))
        workload = f"message stored → advisory stored, during a lingering run, target {target} (slowest {slowest} s)"
        yield at_most(workload, value, 2, " s", "p50 ")
    queue = figures["queue"]
    for name in ("short", "long"):
        workload = (
            f"queue of {queue[f'{name}_messages']:,} copies drained, peak memory {queue[f'{name}_peak_mib']:,} MiB"
        )
        yield at_least(workload, queue[f"{name}_per_second"], None, "/s")


def _trickle(figures: Figures) -> Iterator[Row]:
    for name, most in (("trickle_20", 5), ("trickle_200", 25)):
        trickle = figures[name]
        rate = trickle["messages_per_second"]
        log = f"{trickle['log_lines_per_minute']:.0f} log lines per minute"
        workload = f"{rate:.0f} messages/s under `run --follow` ({log})"
        yield at_most(workload, trickle["percent_of_a_core"], most, " % of a core")
        for end, target in (("target", None), ("queryable", 3)):
            workload = f"message stored → {_ENDS[end]}, {rate:.0f} messages/s (slowest {trickle[f'{end}_max']} s)"
            yield at_most(workload, trickle[f"{end}_p50"], target, " s", "p50 ")


def _sites(figures: Figures) -> Iterator[Row]:
    for name in ("quiet_1", "quiet_10", "quiet_30"):
        quiet = figures[name]
        cpu = f"{quiet['cpu_seconds_per_hour']} CPU s/h"
        workload = f"{quiet['streams']} quiet streams with sensors at 30 s ({cpu}), per stream"
        yield at_most(workload, quiet["percent_of_a_core_per_stream"], 0.2, " % of a core")
    busy = figures["sites_50"]
    for end, moment in (("announced", "advisory stored"), ("queryable", "queryable")):
        label = f"message stored → {moment} (p50 {busy[f'{end}_p50']} s)"
        yield at_most(f"{busy['sites']} busy sites, sensors at 5 s: {label}", busy[f"{end}_p95"], 30, " s", "p95 ")


def _feeds(feeds: Figures) -> Iterator[Row]:
    workload = f"{feeds['advisories']:,} advisories of {feeds['sites']} sites folded"
    yield at_least(workload, feeds["folded_per_second"], 50_000, "/s")
    yield at_most("`nodes --global` on their nodes", feeds["nodes_global_seconds"], 0.5, " s")
    workload = "advisory stored → queryable at the centre, during a lingering run"
    yield at_most(workload, feeds["queryable_seconds_p50"], 5, " s", "p50 ")


def _publication(published: Figures) -> Iterator[Row]:
    yield at_most(f"publication of a site of {published['nodes']:,} nodes", published["alone_seconds"], 0.3, " s")
    for others in (10, 100):
        workload = f"the same with {others} other sites of this size, compared with none"
        yield at_most(workload, published[f"beside_{others}_times"], 1.3, " x")
    nodes, whole = f"{published['centre_nodes']:,}", f"all rows {published['centre_whole_seconds']} s"
    workload = f"{published['centre_changes']} changed nodes published at a centre of {nodes} nodes"
    details = f"{published['centre_written_kib']} KiB written; {whole}"
    yield at_most(f"{workload} ({details})", published["centre_seconds"], 0.3, " s")


def _daily(figures: Figures) -> Iterator[Row]:
    for name, read in (("availability", "transitions"), ("inventory", "messages")):
        computed = figures[name]
        workload = f"{computed['nodes']:,} nodes and {computed[read]:,} {read} over {computed['days']} days"
        memory = f"peak memory {computed['peak_mib']:,} MiB"
        yield at_most(f"{name} of {workload}, {memory}", computed["seconds"], 60, " s")
        differing = computed["differing_rows"]
        workload = f"{name}: {computed['rows']:,} rows compared with SQL"
        yield Row(workload, f"{differing} differ", "0", differing == 0)


def _members(figures: Figures) -> Iterator[Row]:
    """Yield the rows of two members; the TTL of the keys is 10 s, and a checkpoint is stored every 60 s."""
    measured = [figures[name] for name in ("members_10k", "members_100k") if name in figures]
    for kind, label, target in (("killed", "kill -9 of the leader", 20), ("planned", "`step-down`", 5)):
        for known in measured:
            slowest = known[f"{kind}_slowest_seconds"]
            workload = f"{label} → first copy by the other member, {known['nodes']:,} nodes (slowest {slowest} s)"
            yield at_most(workload, known[f"{kind}_seconds"], target, " s", "p50 ")
    for known in measured:
        workload = f"checkpoint of {known['nodes']:,} nodes once a minute ({known['checkpoint_bytes']:,} bytes each)"
        yield at_most(workload, known["checkpoint_percent_of_a_core"], 1, " % of a core")


def _scrape(scrape: Figures) -> Iterator[Row]:
    workload = f"metrics of {scrape['streams']:,} streams scraped; the same directly after a run of every site"
    quiet, busy = scrape["quiet_seconds"], scrape["busy_seconds"]
    yield Row(workload, f"{quiet} s; {busy} s", "≤ 0.2 s", max(quiet, busy) <= 0.2)


def _definitions(known: Figures) -> Iterator[Row]:
    few, some, many = (known[f"load_seconds_{sites}"] for sites in (10, 100, 1_000))
    yield at_most(f"loading the definitions of 1,000 sites (10: {few} s, 100: {some} s), CPU", many, 5, " s")
    yield at_most("loading them in a run's process", known["load_for_a_run_seconds_1000"], None, " s")
    yield at_most("time per site: 1,000 sites compared with 100", known["many_to_some"], 1.3, " x")
    jobs = f"with the snapshot of each job: {known['snapshot_with_jobs_mb_1000']} MB"
    yield at_most(f"snapshot of 1,000 sites from the code server ({jobs})", known["snapshot_mb_1000"], 20, " MB")


def _disk(disk: Figures) -> Iterator[Row]:
    workload = f"Dagster's files after {disk['runs']:,} runs ({disk['before_mib']:,} MiB), one every 5 minutes"
    job = f"the nightly job keeps {disk['left_runs']:,} runs ({disk['seconds']} s)"
    yield at_most(f"{workload}: {job}", disk["left_mib"], 1_000, " MiB")


def _history(history: Figures) -> Iterator[Row]:
    details = f"{history['rows']:,} rows, {history['row_groups']} row groups"
    workload = f"{history['small_files']:,} small history files of one day compacted ({details})"
    yield at_most(workload, history["compacting_seconds"], None, " s")
    yield at_most("rewrites of each of their rows", history["rewritten_times"], 3, " times")
    if "minute_files" in history:
        yield at_most("files after a minute of 40 batches of 1,700 rows", history["minute_files"], 20, "")
        yield at_least("rows of a row group after that minute, median", history["minute_group_rows"], 4_000, "")
    yield at_most("lookup of a node's newest message", history["newest_ms"], 50, " ms")
    yield at_most("lookup of a node's messages of 30 days", history["history_ms"], 1_000, " ms")


def _commands(commands: Figures) -> Iterator[Row]:
    few, many = (f"{commands[name]:,}" for name in ("few_messages", "messages"))
    for kind, label in (
        ("cold", f"{few} of 512 B, a new home without an engine"),
        ("few", f"{few} of 512 B"),
        ("many", f"{many} of 512 B"),
        ("sampled", f"{many} of 7 KB, 10% due"),
    ):
        first, last, whole = (commands[f"{kind}_{figure}_seconds"] for figure in ("first", "last", "whole"))
        workload = f"command `run --once`, {label}: first copy after {first} s, last copy → end {last} s"
        yield at_most(workload, whole, None, " s")
    yield at_most("command `run --once` without work", commands["idle_whole_seconds"], 0.7, " s")
    for name in ("lag", "nodes", "query"):
        yield at_most(f"command `{name}`", commands[f"{name}_seconds"], 0.5, " s")
