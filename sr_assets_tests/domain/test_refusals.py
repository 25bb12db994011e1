"""The reaction to each error of JetStream: only four proofs park a message."""

import pytest

from sr_assets.domain.refusals import CODES, Reaction, reaction

#: `server/errors.json` of nats-server 2.15: the codes that prove that one message alone can never be stored.
TOO_LARGE = {10054: "message size exceeds maximum allowed", 10097: "header size exceeds maximum allowed of 64k"}
#: Errors that the target's operator must resolve first.
STOPPING = {10060: "expected stream does not match", 10109: "invalid operation on sealed stream", 10185: "api level"}


def test_each_code_of_the_servers_has_a_reaction() -> None:
    reactions = {code: reaction(code, "") for code in CODES}
    assert (min(reactions), max(reactions), len(reactions)) == (10002, 10227, 226)
    assert {code for code, wanted in reactions.items() if wanted is Reaction.PARK} == set(TOO_LARGE)
    assert {code for code, wanted in reactions.items() if wanted is Reaction.STOP} == set(STOPPING)


@pytest.mark.parametrize("code", (None, 0, 503, 10001, 10228, 99999))
def test_an_unknown_refusal_waits(code: int | None) -> None:
    assert reaction(code, "not the answer of a stream") is Reaction.WAIT


@pytest.mark.parametrize(
    ("code", "text"),
    (
        (10002, "resource limits exceeded for account"),
        (10023, "insufficient resources"),
        (10028, "insufficient memory resources available"),
        (10047, "insufficient storage resources available"),
        (10077, "maximum messages exceeded"),
        (10077, "maximum bytes exceeded"),
        (10118, "stream is offline"),
        (10167, "too many requests"),
    ),
)
def test_a_refusal_by_target_account_or_server_waits(code: int, text: str) -> None:
    assert reaction(code, text) is Reaction.WAIT


@pytest.mark.parametrize(
    ("code", "text"),
    (*TOO_LARGE.items(), (10077, "maximum messages per subject exceeded"), (400, "the subject is empty")),
)
def test_a_message_that_can_never_be_stored_is_parked(code: int, text: str) -> None:
    assert reaction(code, text) is Reaction.PARK
