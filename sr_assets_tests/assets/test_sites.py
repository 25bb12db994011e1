"""The assets of a site in Dagster when one of its streams fails."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from sr_assets.assets.specs import site_job_name, stream_key
from sr_assets.definitions import build
from sr_assets.stages.replication.batch import Batch
from sr_assets_tests.rig import SITE, Rig, Sent

TRACKED = {"inspect_field": "sender", "inspect_duration": "1h"}
NOUNS = ("node_state", "replica", "node_snapshots", "node_advisories")


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.local_temp(str(tmp_path)) as local:
        yield local


def refuse_copies(rig: Rig, stream: str, _: pytest.MonkeyPatch) -> None:
    rig.create(stream, rig.target, no_ack=True)


def raise_unexpected_error(rig: Rig, stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Batch.run

    def fail(batch: Batch, *arguments: Any) -> None:
        if batch._stream.stream == stream:
            raise LookupError("no such column\ndetails")
        run(batch, *arguments)

    monkeypatch.setattr(Batch, "run", fail)


@pytest.mark.parametrize(
    ("sabotage", "reason"), ((refuse_copies, "no_ack"), (raise_unexpected_error, "LookupError: no such column"))
)
def test_failing_stream_fails_only_its_own_assets(
    rig: Rig,
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
    sabotage: Callable[[Rig, str, pytest.MonkeyPatch], None],
    reason: str,
) -> None:
    bad, good = rig.make("BAD"), rig.make("GOOD")
    for stream in (bad, good):
        rig.add(stream, **TRACKED)
        rig.publish(stream, [Sent(b'{"sender": "web1"}')])
    sabotage(rig, bad, monkeypatch)
    settings = rig.settings()
    job = build(settings).resolve_job_def(site_job_name(SITE))
    result = job.execute_in_process(instance=instance, raise_on_error=False)
    assert not result.success
    (failure,) = result.get_step_failure_events()
    assert failure.step_failure_data.user_failure_data is not None
    (line,) = str(failure.step_failure_data.user_failure_data.description).splitlines()
    assert line.startswith(f"{SITE}/{bad}: ")
    assert reason in line
    keys = {stream_key(entry, noun): entry.stream for entry in settings.streams for noun in NOUNS}
    records = {record.asset_entry.asset_key: record.asset_entry for record in instance.get_asset_records([*keys])}
    # Dagster shows an asset as failed if its last run failed and did not materialise it.
    failed = {key for key in keys if records[key].last_materialization is None}
    assert all(records[key].last_run_id == result.run_id for key in keys)
    assert failed == {stream_key(settings.find(bad)[0], noun) for noun in ("replica", "node_snapshots")}
    checked = {check.asset_key for check in result.get_asset_check_evaluations() if check.passed}
    assert stream_key(settings.find(good)[0], "replica") in checked
