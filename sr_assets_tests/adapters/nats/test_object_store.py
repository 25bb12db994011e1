"""An object store: a server that does not respond, an object that is replaced while it is read."""

import asyncio
import gc
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sr_assets.adapters.nats.object_store import ObjectBucket, _nuid, _read_info, _stored_object
from sr_assets.adapters.state.checkpoint import is_signed, read_description
from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.errors import RunError, TransientError
from sr_assets.embedded.nats_server import NatsServer
from sr_assets_tests.rig import address


def test_object_store_leaves_no_coroutine_without_a_connection(tmp_path: Path) -> None:
    cluster = ClusterSettings(("nats://127.0.0.1:1",))
    with ObjectBucket(cluster, "STATE") as bucket, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(TransientError, match="cannot connect to NATS"):
            bucket.find("a")
        with pytest.raises(TransientError, match="cannot connect to NATS"):
            bucket.get("a", tmp_path / "a")
        gc.collect()
    assert [str(each.message) for each in caught] == []


@pytest.mark.process
def test_object_replaced_while_it_is_read_is_read_anew(
    nats_server: NatsServer, unique: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, file = unique("STATE"), tmp_path / "checkpoint"
    find, nuids = ObjectBucket._find, []
    with ObjectBucket(address(nats_server), name) as reader, ObjectBucket(address(nats_server), name) as writer:
        file.write_bytes(b"old" * 100_000)
        writer.put("site", file, {})
        file.write_bytes(b"new" * 100_000)

        async def replace_before_the_chunks(bucket: ObjectBucket, *arguments: Any) -> Any:
            info = await find(bucket, *arguments)
            nuids.append(info and info["nuid"])
            if len(nuids) == 1:
                await asyncio.to_thread(writer.put, "site", file, {})
            return info

        monkeypatch.setattr(ObjectBucket, "_find", replace_before_the_chunks)
        assert reader.get("site", tmp_path / "read")
    assert (tmp_path / "read").read_bytes() == b"new" * 100_000
    assert len(set(nuids)) == 2


@pytest.mark.process
def test_full_local_disk_is_not_an_error_of_the_store(
    nats_server: NatsServer, unique: Callable[[str], str], tmp_path: Path
) -> None:
    file, full = tmp_path / "checkpoint", Path("/dev/full")
    file.write_bytes(b"0" * 300_000)
    with ObjectBucket(address(nats_server), unique("STATE")) as bucket:
        bucket.put("site", file, {})
        for local, problem in ((full, "No space left on device"), (tmp_path / "none" / "a", "No such file")):
            with pytest.raises(
                RunError, match=rf"^{local} cannot be written \({problem}.*\); free some space"
            ) as raised:
                bucket.get("site", local)
            assert not isinstance(raised.value, TransientError)
        with pytest.raises(FileNotFoundError):
            bucket.put("site", tmp_path / "none", {})
        # The connection still works.
        assert bucket.get("site", tmp_path / "read")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)
DESCRIPTIONS = st.fixed_dictionaries(
    {"at_ns": VALUES | st.just(1), "positions": VALUES | st.just({"S": 1})},
    optional={"commit": VALUES | st.just(1), "markers": VALUES, "sha256": VALUES, "hmac": VALUES},
)
INFOS = st.fixed_dictionaries(
    {"description": VALUES | DESCRIPTIONS.map(json.dumps) | st.text("\ud800ab{}", max_size=3)},
    optional={"nuid": VALUES | st.just("a>"), "size": VALUES, "deleted": VALUES, "digest": VALUES},
)


@given(st.binary(max_size=60) | (INFOS | VALUES).map(lambda info: json.dumps(info).encode()) | st.just(b"[" * 100_000))
@example(json.dumps({"description": "\ud800"}).encode())
@example(json.dumps({"description": json.dumps({"at_ns": 1, "positions": {}, "hmac": "\ud800"})}).encode())
def test_any_info_of_an_object_is_read_or_ignored(payload: bytes) -> None:
    info = _read_info(payload)
    nuid = _nuid(info)
    assert len(nuid) <= 64
    assert not set(nuid) & set(".*> ")
    held = _stored_object(info)
    if held is not None:
        assert held.size_bytes >= 0
        stored = read_description(held.description)
        if stored is not None:
            assert not is_signed("key", "site", stored, held.description)
