"""The public format `jetstream` in a PySpark session of a user's script: batch, streaming, write, and refused options."""

import json
import os
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import LongType, StructField, StructType

from sr_assets.adapters.spark.stream_format import BATCH_OPTIONS, STREAMING_OPTIONS, WRITE_OPTIONS, parse_options
from sr_assets.adapters.spark.stream_reader import SequencePartition, StreamStreamReader
from sr_assets.domain.errors import ConfigurationError
from sr_assets_tests.adapters.spark.scripts import Printed, ScriptServer, run_alone
from sr_assets_tests.rig import Rig, Sent

pytestmark = pytest.mark.process

Script = Callable[..., Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptServer]:
    """The process of the scripts that share a session."""
    with ScriptServer(tmp_path_factory.mktemp("scripts")) as started:
        yield started


def outcome_of(printed: Printed, *, fails: bool, prints_json: bool) -> Any:
    """Return what a script printed, one JSON value per line, or its error."""
    assert (printed.error is not None) == fails, printed.error
    if fails:
        return printed.error
    return [json.loads(line) for line in printed.text.splitlines()] if prints_json else printed.text


@pytest.fixture
def script(rig: Rig, tmp_path: Path, server: ScriptServer) -> Script:
    """Run a script in the shared session, and return what it prints or its error."""

    def run(stream: str, text: str, *, fails: bool = False, prints_json: bool = True) -> Any:
        printed = server.run(text, f"nats://{rig.source.address}", stream, tmp_path)
        return outcome_of(printed, fails=fails, prints_json=prints_json)

    return run


@pytest.fixture
def lone_script(rig: Rig, tmp_path: Path) -> Script:
    """Run a script in its own process, and return what it prints or its error."""

    def run(stream: str, text: str, *, fails: bool = False, prints_json: bool = True) -> Any:
        printed = run_alone(text, f"nats://{rig.source.address}", stream, tmp_path)
        return outcome_of(printed, fails=fails, prints_json=prints_json)

    return run


def publish(rig: Rig, stream: str, numbers: range) -> None:
    rig.publish(stream, [Sent(b"%d" % n, f"s{n % 2}") for n in numbers])


def test_batch_reads_columns_ranges_and_filters(rig: Rig, script: Script) -> None:
    stream = rig.make()
    headers = b"NATS/1.0\r\nSite: a\r\nSite: b\r\nOther: \r\n\r\n"
    rig.publish(stream, [Sent(b"first", "a", headers), *(Sent(b"%d" % n, f"s{n % 2}") for n in range(2, 31))])
    for sequence in (2, *range(10, 20)):
        rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})
    held = [1, *range(3, 10), *range(20, 31)]
    rows, parts, ranged, timed, columns, filtered = script(
        stream,
        f"""
        every = source(partitions="3").load()
        rows = [row.asDict() for row in every.orderBy("sequence").collect()]
        show([row | {{"payload": bytes(row["payload"]).decode()}} for row in rows])
        show(every.rdd.getNumPartitions())
        show([r.sequence for r in source(start="5", end="22").load().where("sequence > 6").collect()])
        at = next(row["stored_at"] for row in rows if row["sequence"] == 20)
        since = source(start=at.isoformat(timespec="microseconds") + "Z").load()
        show([r.sequence for r in since.where(f.col("stored_at") >= at).collect()])
        show([r.asDict() for r in source().schema("subject string, sequence bigint").load().where("sequence = 1").collect()])
        pushing = lambda: source(push_filters="true").load()
        show([r.sequence for r in pushing().where("sequence between 5 and 7 and subject = '{stream}.s1'").collect()]
             + [pushing().where("subject like '{stream}.s%' and sequence <= 4").count()])
        """,
    )
    assert [row["sequence"] for row in rows] == held
    assert rows[1]["subject"] == f"{stream}.s1"
    assert rows[0]["headers"] == {"Site": ["a", "b"], "Other": [""]}
    assert rows[1]["headers"] is None
    assert (rows[0]["payload"], rows[1]["payload"]) == ("first", "3")
    assert abs(datetime.fromisoformat(rows[0]["stored_at"]).replace(tzinfo=UTC) - datetime.now(UTC)) < timedelta(
        hours=1
    )
    assert parts == 3
    assert ranged == [7, 8, 9, 20, 21]
    assert timed == list(range(20, 31))
    assert columns == [{"subject": f"{stream}.a", "sequence": 1}]
    assert filtered == [5, 7, 2]


def test_stream_restarts_exactly_once_from_its_checkpoint(rig: Rig, script: Script, tmp_path: Path) -> None:
    stream = rig.make()
    publish(rig, stream, range(1, 26))
    read = """
        query = (spark.readStream.format("jetstream").options(url=url, stream=stream, start="1",
                 max_messages_per_trigger="10").load().selectExpr("sequence", "cast(payload as string) as text")
                 .writeStream.format("json").option("path", folder + "/rows")
                 .option("checkpointLocation", folder + "/checkpoint").trigger(availableNow=True).start())
        query.awaitTermination()
        show([batch["numInputRows"] for batch in query.recentProgress])
    """
    (sizes,) = script(stream, read)
    assert [size for size in sizes if size] == [10, 10, 5]
    rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": 27})
    publish(rig, stream, range(26, 31))
    rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": 27})
    (again,) = script(stream, read)
    assert sum(again) == 4
    lines = [json.loads(line) for file in (tmp_path / "rows").glob("*.json") for line in file.read_text().splitlines()]
    assert sorted(row["sequence"] for row in lines) == [*range(1, 27), 28, 29, 30]
    rig.api(f"STREAM.DELETE.{stream}")
    rig.create(stream)
    assert "is not the stream of this query's checkpoint" in script(stream, read, fails=True)


def test_each_query_of_a_frame_stands_alone(rig: Rig, script: Script) -> None:
    stream = rig.make()
    publish(rig, stream, range(1, 31))
    counts, empty = script(
        stream,
        """
        frame = source().load()
        first, last = frame.where("sequence <= 10"), frame.where("sequence > 25")
        show([last.count(), frame.count(), frame.where("sequence = 1 or sequence = 30").count(), first.union(last).count(),
              frame.join(first, "sequence", "left_anti").count()])
        show([source(start="99").load().count(), source(end="1999-01-01T00:00:00Z").load().count(),
              source(start="10", end="10").load().count(), frame.where("sequence > 20 and sequence < 10").count(),
              source(push_filters="true").load().where("sequence > 20 and sequence < 10").count()])
        """,
    )
    assert (counts, empty) == ([5, 30, 2, 15, 20], [0] * 5)


# The reader's part of it is in the next test.
@pytest.mark.nightly
def test_query_that_fails_in_its_first_batch_restarts(rig: Rig, script: Script) -> None:
    """Spark stores only the end of the first batch; until that is committed, it asks for the start again."""
    stream = rig.make()
    publish(rig, stream, range(1, 6))
    read = """
        def consume(rows, batch):
            got = [row.sequence for row in rows.select("sequence").collect()]
            if fails:
                raise RuntimeError("no consumer yet")
            seen.extend(got)
        seen, fails = [], {fails}
        query = (spark.readStream.format("jetstream").options(url=url, stream=stream{options}).load()
                 .writeStream.foreachBatch(consume).option("checkpointLocation", folder + "/{name}")
                 .trigger(processingTime="100 milliseconds").start())
        query.processAllAvailable()
        query.stop()
        show(sorted(seen))
    """
    assert "no consumer yet" in script(stream, read.format(fails=True, options="", name="new"), fails=True)
    publish(rig, stream, range(6, 9))
    assert script(stream, read.format(fails=False, options="", name="new")) == [[6, 7, 8]]
    ahead = read.format(fails=False, options=', start="10"', name="ahead")
    assert script(stream, ahead) == [[]]
    publish(rig, stream, range(9, 12))
    assert script(stream, ahead) == [[10, 11]]


def test_first_batch_has_the_same_messages_after_a_restart(rig: Rig) -> None:
    stream = rig.make()
    publish(rig, stream, range(1, 6))

    def started() -> StreamStreamReader:
        options = parse_options({"url": f"nats://{rig.source.address}", "stream": stream}, STREAMING_OPTIONS)
        return StreamStreamReader(options, StructType([StructField("sequence", LongType())]))

    first, again = started(), started()
    start = first.initialOffset()
    publish(rig, stream, range(6, 8))
    assert first.initialOffset() == start
    end = first.latestOffset(start, ReadAllAvailable())
    publish(rig, stream, range(8, 10))
    for reader, since in ((first, start), (again, again.initialOffset())):
        (task,) = reader.partitions(since, end)
        assert isinstance(task, SequencePartition)
        assert (task.first, task.next) == (6, 8)


def test_repeated_batch_loses_no_row_after_a_purge_of_its_source(rig: Rig, script: Script) -> None:
    stream, target = rig.make(), rig.make("COPY", subjects=["to.>"], max_msgs=60, discard="new")
    publish(rig, stream, range(1, 101))
    copy = f"""
        rows = spark.readStream.format("jetstream").options(url=url, stream=stream, start="1", partitions="{{tasks}}").load()
        query = (rows.selectExpr("concat('to.', subject) as subject", "payload").writeStream.format("jetstream")
                 .options(url=url, stream="{target}").option("checkpointLocation", folder + "/checkpoint")
                 .trigger(availableNow=True).start())
        query.awaitTermination()
    """
    assert "maximum messages exceeded" in script(stream, copy.format(tasks=1), fails=True)
    assert [int(message.payload) for message in rig.stored(target)] == list(range(1, 61))
    rig.api(f"STREAM.PURGE.{stream}", {"seq": 31})
    config = rig.info(target).config
    rig.api(f"STREAM.UPDATE.{target}", {**config, "max_msgs": -1})
    script(stream, copy.format(tasks=3))
    assert [int(message.payload) for message in rig.stored(target)] == list(range(1, 101))


def test_each_save_in_a_batch_of_a_query_is_stored(rig: Rig, script: Script) -> None:
    stream, target = rig.make(), rig.make("COPY", subjects=["twice.>"])
    publish(rig, stream, range(1, 6))
    script(
        stream,
        f"""
        def twice(rows, batch):
            for _ in range(2):
                (rows.selectExpr("concat('twice.', subject) as subject", "payload").write.format("jetstream")
                 .options(url=url, stream="{target}").mode("append").save())
        (spark.readStream.format("jetstream").options(url=url, stream=stream, start="1").load().writeStream
         .foreachBatch(twice).option("checkpointLocation", folder + "/c").trigger(availableNow=True).start().awaitTermination())
        """,
    )
    assert sorted(int(message.payload) for message in rig.stored(target)) == sorted([*range(1, 6)] * 2)


def test_write_publishes_each_row_once_with_headers(rig: Rig, script: Script) -> None:
    stream = rig.make()
    script(
        stream,
        f"""
        rows = spark.range(0, 200, 1, 4).selectExpr(
            "concat('{stream}.n', id) as subject", "cast(cast(id as string) as binary) as payload",
            "map('Nats-Msg-Id', array(concat('m', id % 100)), 'Site', array('a', 'b')) as headers")
        rows.write.format("jetstream").options(url=url, stream=stream).mode("append").save()
        rows.select("subject", "payload").write.format("jetstream").options(url=url, stream=stream).mode("append").save()
        """,
    )
    stored = rig.stored(stream)
    given, own = stored[:100], stored[100:]
    assert len({message.headers for message in given}) == 100
    assert all(b"Site: a\r\nSite: b\r\n" in message.headers for message in given)
    assert sorted(int(message.payload) for message in own) == list(range(200))


def documented_examples(stream: str, copies: str, url: str, checkpoint: Path) -> str:
    """Return the examples of docs/spark.md as one script that reads a stream and writes into another."""
    text = (Path(__file__).parents[3] / "docs" / "spark.md").read_text()
    examples = "".join(re.findall(r"```python spark\n(.*?)```", text, re.DOTALL))
    for shown, real in (
        ("nats://localhost:4222", url),
        ("NODES", stream),
        ("COPIES", copies),
        ("nodes.eu.%", f"{stream}.%"),
        ("/var/lib/copies", str(checkpoint)),
    ):
        assert shown in examples
        examples = examples.replace(shown, real)
    return examples


@pytest.mark.parametrize(
    "first",
    (
        "script",
        # In a process of its own, whose checkpoint another process continues.
        pytest.param("lone_script", marks=pytest.mark.nightly),
    ),
)
def test_documented_examples_run_against_a_stream(
    rig: Rig, request: pytest.FixtureRequest, script: Script, tmp_path: Path, first: str
) -> None:
    stream, copies = rig.make(), rig.make("COPIES", subjects=["copies.>"])
    publish(rig, stream, range(1, 4))
    examples = documented_examples(stream, copies, f"nats://{rig.source.address}", tmp_path / "checkpoint")
    run: Script = request.getfixturevalue(first)
    shown = run(stream, examples, prints_json=False)
    assert re.search(rf"\| *{stream}\.s1\| *2\|", shown)
    publish(rig, stream, range(4, 6))
    script(stream, examples, prints_json=False)
    assert [int(message.payload) for message in rig.stored(copies)] == [1, 2, 3, 4, 5]
    # The subjects are the documented ones, so that no other stream can have them.
    rig.api(f"STREAM.DELETE.{copies}")


def test_misuse_is_one_line_inside_the_exception(rig: Rig, script: Script) -> None:
    lines = script(
        rig.make(),
        """
        row = spark.sql("select 'other' as subject, cast('x' as binary) as payload")
        def problem(use):
            try:
                use()
            except Exception as error:
                return [line for line in str(error).splitlines() if "Error: " in line and "sr_assets" in line][-1]
        show(problem(lambda: source(begin="1").load().count()))
        to = lambda mode: row.write.format("jetstream").options(url=url, stream=stream).mode(mode).save()
        show(problem(lambda: to("overwrite")))
        show(problem(lambda: to("append")))
        texts = row.withColumn("headers", f.expr("map('A', 'abc')"))
        show(problem(lambda: texts.write.format("jetstream").options(url=url, stream=stream).mode("append").save()))
        show(problem(lambda: spark.read.format("jetstream").options(url=url, stream="MISSING").load().count()))
        """,
    )
    for line, part in zip(
        lines,
        (
            "ConfigurationError: option begin is unknown here; the options are: ",
            "ConfigurationError: mode overwrite: ",
            "RunError: subject 'other': stream ",
            "ConfigurationError: the columns are ",
            "MISSING",
        ),
        strict=True,
    ):
        assert part in line


@pytest.mark.parametrize(
    ("accepted", "options", "problem"),
    (
        (BATCH_OPTIONS, {"strem": "S"}, "option strem is unknown here; did you mean 'stream'?"),
        (BATCH_OPTIONS, {"max_messages_per_trigger": "5"}, "option max_messages_per_trigger is unknown here"),
        (STREAMING_OPTIONS, {"end": "5"}, "option end is unknown here"),
        (WRITE_OPTIONS, {"start": "5"}, "option start is unknown here"),
        (BATCH_OPTIONS, {"url": ""}, "option url is missing"),
        (BATCH_OPTIONS, {"url": "nats://me:secret@h:4222"}, "option url contains a login"),
        (BATCH_OPTIONS, {"start": "soon"}, "option start: 'soon' is neither a sequence nor a time"),
        (BATCH_OPTIONS, {"stream": "a.b"}, "option stream: 'a.b' is not the name of a stream"),
        (BATCH_OPTIONS, {"filter_subject": "a..b"}, "option filter_subject: 'a..b' is not a subject"),
        (BATCH_OPTIONS, {"push_filters": "yes"}, "option push_filters: 'yes' is neither true nor false"),
        (BATCH_OPTIONS, {"partitions": "0"}, "option partitions: '0' is not a positive number"),
    ),
)
def test_options_are_refused_in_one_line(accepted: tuple[str, ...], options: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse_options({"url": "nats://127.0.0.1:4222", "stream": "S"} | options, accepted)
    assert str(refused.value).startswith(problem)
    assert "secret" not in str(refused.value)
    assert os.linesep not in str(refused.value)
