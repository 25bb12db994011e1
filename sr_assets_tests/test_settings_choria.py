"""The keys by which a Choria site connects: what they mean, and with which message a bad one is refused."""

from pathlib import Path

import pytest

from sr_assets.domain.errors import ConfigurationError
from sr_assets.settings import Settings, load_settings

STREAM = "{stream: REG, source_url: city, target_url: centre%s}"


def load(folder: Path, keys: str = "", top: str = "") -> Settings:
    """Load one stream with these keys more, and keys of the top level."""
    file = folder / "replication.yaml"
    file.write_text(f"name: EAST\n{top}\nstreams: [{STREAM % (keys and f', {keys}')}]\n")
    return load_settings(file, {})


def refusal(folder: Path, keys: str = "", top: str = "") -> str:
    """Load what must be refused; returns the one line without the file."""
    with pytest.raises(ConfigurationError) as caught:
        load(folder, keys, top)
    line = str(caught.value)
    assert "\n" not in line
    return line.partition("replication.yaml: ")[2].removeprefix("stream 'REG': ")


def test_each_link_asks_the_jetstream_of_its_domain_or_prefix(tmp_path: Path) -> None:
    (stream,) = load(tmp_path, "source_domain: leaf, target_api_prefix: fleet.JS.API.").streams
    assert stream.source.api("STREAM.NAMES") == "$JS.leaf.API.STREAM.NAMES"
    assert stream.target.api("STREAM.NAMES") == "fleet.JS.API.STREAM.NAMES"
    (feed,) = load(tmp_path, top="feeds: [{stream: ADV, url: 'hub?inbox_prefix=in.box', domain: hub}]").feeds
    assert (feed.source.api("INFO"), feed.source.inbox_prefix) == ("$JS.hub.API.INFO", "in.box")
    assert [link.api_owner for link in (stream.source, stream.target)] == ["domain leaf", "API prefix fleet.JS.API"]


@pytest.mark.parametrize(
    ("keys", "says"),
    (
        ("source_domain: a.b", "source_domain: 'a.b' cannot name a JetStream domain"),
        ("source_domain: '*'", "source_domain: '*' is not a subject"),
        ("target_api_prefix: '$JS.>'", "target_api_prefix: '$JS.>' is not a subject"),
        ("target_domain: a, target_api_prefix: b", "target_domain, target_api_prefix: name either"),
    ),
)
def test_a_domain_that_cannot_be_asked_is_refused(keys: str, says: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, keys).startswith(says)


def test_an_inbox_prefix_is_plain(tmp_path: Path) -> None:
    said = refusal(tmp_path, top="feeds: [{stream: ADV, url: 'hub?inbox_prefix=a.>'}]")
    assert "inbox_prefix in the URL is not the beginning of a subject" in said
