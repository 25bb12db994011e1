"""The table of needed permissions, and its output formats, from configurations without servers."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from sr_assets.domain.permissions import Action, Facts, StreamFacts
from sr_assets.settings import Settings, load_settings
from sr_assets.settings.needed_permissions import needed_permissions
from sr_assets.stages.connection_users import list_users, nats_blocks, nsc_commands, row

SOURCE, TARGET = "nats://sr:secret@127.0.0.1:1", "nats://127.0.0.1:2"


def settings(folder: Path, entry: dict[str, Any], **top: Any) -> Settings:
    stream = {"stream": "S", "source_url": SOURCE, "target_url": TARGET, **entry}
    file = folder / "replication.yaml"
    file.write_text(yaml.safe_dump({"name": "R", "streams": [stream], **top}))
    return load_settings(file, {})


def published(configured: Settings, role: str, facts: Facts | None = None) -> set[str]:
    needs = needed_permissions(configured, facts)
    return {need.subject for need in needs if need.role == role and need.action is Action.PUBLISH}


@pytest.mark.parametrize(
    ("entry", "copies"),
    (
        ({"filter_subject": "a.>"}, "a.>"),
        ({"filter_subject": "a.b.>", "target_subject_remove": "a."}, "b.>"),
        ({"target_subject_prefix": "site"}, "site.>"),
        ({"target_subject_prefix": "site", "filter_subject": "a.*"}, "site.a.*"),
    ),
)
def test_copies_are_named_by_filter_or_prefix(tmp_path: Path, entry: dict[str, Any], copies: str) -> None:
    assert copies in published(settings(tmp_path, entry), "target")


def test_unknown_copies_come_from_the_server_or_are_marked(tmp_path: Path) -> None:
    configured = settings(tmp_path, {})
    assert "a.>" in published(configured, "target", Facts({"R/S": StreamFacts(copies=("a.>",))}))
    assert ">" not in published(configured, "target")
    text = nats_blocks(list_users(needed_permissions(configured)))
    assert "# UNKNOWN: target R/S: publish copies: the configuration does not name" in text


@pytest.mark.parametrize(
    ("domain", "prefixes"), ((None, {"$JS.d.API", "$JS.API"}), ("d", {"$JS.API"}), ("hub", {"$JS.d.API"}))
)
def test_own_domain_is_tested_by_the_plain_api(tmp_path: Path, domain: str | None, prefixes: set[str]) -> None:
    configured = settings(tmp_path, {"source_domain": "d", "filter_subject": "a"})
    facts = Facts(domains={} if domain is None else {configured.streams[0].source: domain})
    subjects = published(configured, "source", facts)
    assert {subject.partition(".STREAM.INFO.")[0] for subject in subjects if "STREAM.INFO" in subject} == prefixes


def test_api_prefix_needs_an_import(tmp_path: Path) -> None:
    configured = settings(tmp_path, {"source_api_prefix": "fleet.API", "filter_subject": "a"})
    needs = needed_permissions(configured)
    assert {need.subject for need in needs if need.action is Action.IMPORT} == {"fleet.API.>"}
    commands = nsc_commands(list_users(needs))
    assert "--remote-subject '$JS.API.>' --local-subject 'fleet.API.>'" in commands
    assert "nsc edit user --name sr --allow-pub fleet.API.STREAM.INFO.S" in commands


def test_sites_of_a_store_have_subjects_of_their_own(tmp_path: Path) -> None:
    stored = {}
    for site in ("paris", "london"):
        configured = settings(tmp_path, {"name": site}, checkpoint={"cluster": "target"})
        subjects = published(configured, "checkpoint")
        stored[site] = {subject for subject in subjects if subject.startswith("$O.SR_ASSETS_STATE.M.")}
        assert len(stored[site]) == 1
        assert not any("*" in subject for subject in stored[site])
        text = nats_blocks(list_users(needed_permissions(configured)))
        assert "# only members of the election may publish to the subjects below" in text
        assert f"#   {next(iter(stored[site]))}\n" in text
    assert not stored["paris"] & stored["london"]


def test_output_names_users_and_no_password(tmp_path: Path) -> None:
    clusters = list_users(needed_permissions(settings(tmp_path, {"filter_subject": "a"})))
    text = nats_blocks(clusters)
    assert "# nats://127.0.0.1:1 user sr: source\n" in text
    assert "# nats://127.0.0.1:2 user sr-assets: target\n# the configuration has no login" in text
    assert text.count("password: $SR_ASSETS_PASSWORD") == text.count("authorization {") == 2
    assert "secret" not in text + nsc_commands(clusters)
    ((user,), _) = clusters
    assert row(user, user.needs[0])["url"] == "nats://127.0.0.1:1"


def test_connections_of_one_login_are_one_user(tmp_path: Path) -> None:
    second = {
        "stream": "T",
        "source_url": SOURCE,
        "target_url": SOURCE.replace("127.0.0.1", "localhost"),
        "target_subject_prefix": "x",
    }
    stream = {"stream": "S", "source_url": SOURCE, "target_url": TARGET}
    file = tmp_path / "replication.yaml"
    file.write_text(yaml.safe_dump({"name": "R", "streams": [stream, {**second, "target_stream": "U"}]}))
    clusters = list_users(needed_permissions(load_settings(file, {})))
    assert [[user.name for user in users] for users in clusters] == [["sr"], ["sr-assets"]]
