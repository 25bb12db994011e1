"""An object store on a server that does not respond."""

import gc
import warnings
from pathlib import Path

import pytest

from sr_assets.adapters.nats.object_store import ObjectBucket
from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.errors import TransientError


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
