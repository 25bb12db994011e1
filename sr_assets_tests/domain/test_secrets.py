"""Masking of values that look like secrets."""

import json

import pytest

from sr_assets.domain.secrets import masked, quoted


@pytest.mark.parametrize(
    ("key", "value"),
    (
        ("ops/db_password", "x"),
        ("ops/url", "nats://user:word@host"),
        ("ops/url", "see 2tls://user:word@host"),
        ("ops/x", "Bearer eyJhbGciOi.eyJzdWIi.c2ln"),
        ("ops/x", "-----BEGIN NATS USER JWT-----"),
        ("ops/x", {"nested": ["nats://user:word@host"]}),
        ("ops/x", '{"password": "x"}'),
        ("ops/x", "[{\"user\": 1, 'db_password_2' : x}]"),
        ("ops/x", {"nested": [{"apiKey": "x"}]}),
        ("ops/x", json.dumps({"inner": json.dumps({"token": "x"})})),
        ("ops/x", "user: a\npassword: b"),
        ("ops/x", "https://hooks.example/T0/B0/x"),
        ("ops/x", {"to": "https://chat.example/api/webhooks/1/x"}),
    ),
)
def test_value_is_masked_when_its_key_or_form_is_a_secret(key: str, value: object) -> None:
    assert masked(key, value) == "***"


@pytest.mark.parametrize(
    "value", ("nats://host:4222", "2h", "eyJust text", "a@b", "monkey.eyJx", "the token of a node", "http://host/a")
)
def test_other_values_are_shown(value: str) -> None:
    assert masked("ops/x", value) == value


@pytest.mark.parametrize(
    "piece", ("x", "a-", "eyJ-", "eyJ.", "://", "://a", "S" * 60, "-----BEGIN", "password", "password ", "https://")
)
def test_form_of_a_long_value_is_found_in_linear_time(piece: str) -> None:
    # Quadratic time would be minutes.
    masked("ops/x", (piece * 300_000)[:300_000])


def test_value_in_a_message_is_one_short_line() -> None:
    assert quoted("ops/x", "a\nb") == r"'a\nb'"
    assert len(quoted("ops/x", "y" * 1000)) < 100
    assert quoted("ops/x", {1, 2}) == "'\"{1, 2}\"'"
