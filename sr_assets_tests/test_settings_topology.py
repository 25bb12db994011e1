"""The block `topology`: JetStream configurations made from it, and contradictions found without a server."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from sr_assets.domain.errors import ConfigurationError
from sr_assets.domain.topology.wanted import OWNER, Transform
from sr_assets.settings import TopologySettings, load_settings

CLUSTERS = {"hub": {"url": "hub:4222", "domain": "hub"}, "city": {"url": "city:4222", "domain": "city"}}


def load(
    folder: Path, *streams: Mapping[str, object], clusters: Mapping[str, object] | None = None
) -> TopologySettings:
    file = folder / "replication.yaml"
    block = {"clusters": CLUSTERS if clusters is None else clusters, "streams": [dict(stream) for stream in streams]}
    file.write_text(yaml.safe_dump({"name": "CENTRE", "topology": block}, sort_keys=False))
    topology = load_settings(file, {}).topology
    assert topology is not None
    return topology


def test_native_stream_becomes_a_jetstream_configuration(tmp_path: Path) -> None:
    orders = {"cluster": "city", "stream": "ORDERS", "subjects": ["orders.>"], "max_age": "1d"}
    moved = {
        "stream": "ORDERS",
        "cluster": "city",
        "subject_transforms": [{"src": "orders.>", "dest": "city.orders.>"}],
    }
    archive = {
        "cluster": "hub",
        "stream": "ARCHIVE",
        "replicas": 3,
        "placement": {"tags": ["ssd"]},
        "sources": [moved, {"stream": "LOCAL", "filter_subject": "local.>", "start_sequence": 7}],
    }
    topology = load(tmp_path, orders, archive)
    assert topology.manage == "observe"
    made = topology.streams[1].whole("CENTRE")
    assert made["sources"] == [
        {
            "name": "ORDERS",
            "subject_transforms": [Transform("orders.>", "city.orders.>")._asdict()],
            "external": {"api": "$JS.city.API", "deliver": ""},
        },
        {"name": "LOCAL", "filter_subject": "local.>", "opt_start_seq": 7},
    ]
    assert (made["num_replicas"], made["storage"], made["placement"]) == (3, "file", {"tags": ["ssd"]})
    assert made["metadata"] == {OWNER: "CENTRE"}
    assert topology.streams[0].whole("CENTRE")["max_age"] == 86_400 * 10**9


@pytest.mark.parametrize(
    ("keys", "message"),
    (
        ({"mirror": {"stream": "A"}, "sources": [{"stream": "B"}]}, "either one mirror or sources"),
        ({"mirror": {"stream": "A"}, "subjects": ["a"]}, "stores no messages of its own"),
        ({"mirror": {"stream": "A"}, "duplicate_window": "2m"}, "a mirror does not detect duplicates"),
        ({"mirror": {"stream": "A", "filter_subject": "a", "subject_transforms": [{"src": "a"}]}}, "use one of them"),
        (
            {"mirror": {"stream": "A", "start_sequence": 1, "start_time": "2026-01-31T12:00:00Z"}},
            "exclude each other; use one",
        ),
        ({"mirror": {"stream": "A", "cluster": "hubb"}}, "unknown cluster 'hubb'; did you mean 'hub'?"),
        ({"cluster": None, "mirror": {"stream": "A"}}, "cluster is required, because there are several: hub, city"),
        ({"sources": [{"stream": "A"}, {"stream": "A"}]}, "'A' appears twice with the same filter"),
        ({"mirror": {"stream": "S"}}, "hub/S → hub/S: the links form a loop"),
        ({}, "needs mirror, sources or subjects"),
        ({"subjects": ["a.>", "a.b"]}, "'a.>' and 'a.b' overlap"),
        ({"subjects": ["a"], "replicas": 7}, "7 is not a whole number, 1 to 5"),
        ({"subjects": ["a"], "colour": "red"}, "unknown key 'colour'"),
        ({"mirror": {"stream": "A", "filter_subjects": "a"}}, "did you mean 'filter_subject'?"),
    ),
)
def test_contradiction_in_topology_is_named_with_its_stream(
    tmp_path: Path, keys: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load(tmp_path, {"cluster": "hub", "stream": "S", **keys})
    line = str(refused.value)
    assert message in line
    assert "\n" not in line
    assert "topology: " in line
    assert "S" in line


def test_links_that_form_a_loop_are_refused(
    tmp_path: Path,
) -> None:
    def exchange(to_hub: str | None, to_city: str | None) -> TopologySettings:
        hub = {
            "cluster": "hub",
            "stream": "H",
            "sources": [{"stream": "C", "cluster": "city", "filter_subject": to_hub}],
        }
        city = {
            "cluster": "city",
            "stream": "C",
            "sources": [{"stream": "H", "cluster": "hub", "filter_subject": to_city}],
        }
        return load(tmp_path, hub, city)

    for filters in ((None, None), ("x.>", None), ("x.*", "x.y")):
        with pytest.raises(ConfigurationError, match="the links form a loop"):
            exchange(*filters)
    assert len(exchange("city.>", "hub.>").streams) == 2


def test_equal_streams_and_empty_clusters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="'hub/S' appears twice"):
        load(tmp_path, *[{"cluster": "hub", "stream": "S", "subjects": ["a"]}] * 2)
    with pytest.raises(ConfigurationError, match="get the same asset key"):
        load(tmp_path, *({"cluster": "hub", "stream": name, "subjects": ["a"]} for name in ("S-1", "S_1")))
    with pytest.raises(ConfigurationError, match="clusters: is empty"):
        load(tmp_path, clusters={})


def test_entry_belongs_to_cluster_with_its_servers(tmp_path: Path) -> None:
    topology = load(tmp_path, {"cluster": "hub", "stream": "S", "subjects": ["a"]})
    file = tmp_path / "entries.yaml"
    entry = {"source_url": "city:4222", "target_url": "hub:4222", "target_domain": "hub", "stream": "REG"}
    file.write_text(yaml.safe_dump({"name": "CENTRE", "streams": [entry]}))
    (stream,) = load_settings(file, {}).streams
    ends = [topology.cluster_of(end) for end in (stream.source, stream.target)]
    assert [cluster.name if cluster else None for cluster in ends] == ["city", "hub"]


def test_replaceable_entry_copies_all_unchanged_between_linked_clusters(tmp_path: Path) -> None:
    file = tmp_path / "replication.yaml"

    def hinted(topology: object = None, **keys: object) -> bool:
        entry = {"source_url": "city:4222", "target_url": "hub:4222", "stream": "REG", **keys}
        file.write_text(yaml.safe_dump({"name": "CENTRE", "streams": [entry], "topology": topology}))
        settings = load_settings(file, {})
        (stream,) = settings.streams
        return stream.copies_all_unchanged and settings.linked(stream.source, stream.target)

    both = {"clusters": CLUSTERS}
    assert hinted(both)
    assert not hinted()
    for keys in ({"filter_subject": "a"}, {"target_subject_prefix": "x"}, {"max_age": "1h"}):
        assert not hinted(both, **keys)
