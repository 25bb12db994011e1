"""Heartbeats: the duration of each hop by the clocks of the streams, which may differ."""

from hypothesis import given
from hypothesis import strategies as st

from sr_assets.domain.hops import Hop, hops, is_heartbeat
from sr_assets.domain.senders import SubjectToken, inspect

S = 1_000_000_000
T0 = 1_700_000_000
OWN = b"NATS/1.0\r\nChoria-SR-Originator: sr1\r\nChoria-SR-Subject: hb.a\r\n"
FIRST = b"Choria-SR-Source: CITY 7 LDN london %d\r\n" % (T0 * 1000 + 250)
SECOND = b"Choria-SR-Source: REGION 9 EU region %d\r\n" % (T0 * 1000 + 1250)


def measure(headers: bytes, payload: bytes = b"1", arrived_ns: int = T0 * S) -> tuple[list[Hop], int]:
    return hops(headers, payload, arrived_ns, heartbeat=True)


def test_hop_lasts_from_its_stream_time_to_the_next() -> None:
    block = OWN + FIRST + SECOND + b"\r\n"
    assert measure(block, b"%d" % T0, (T0 + 60) * S)[0] == [
        Hop("london", "CITY", "hb.a", "sr1", T0 * S, T0 * S + S // 4, T0 * S + S // 4 + S),
        Hop("region", "REGION", "hb.a", "sr1", T0 * S, T0 * S + S // 4 + S, (T0 + 60) * S),
    ]
    assert [hop.subject for hop in hops(block, b"", (T0 + 60) * S, heartbeat=False)[0]] == ["", ""]


def test_hop_shows_clock_differences_and_ends_at_an_invalid_one() -> None:
    (hop,), impossible = measure(OWN + b"Choria-SR-Source: nonsense\r\n" + FIRST + b"\r\n", b"soon", (T0 - 1) * S)
    assert (hop.sent_ns, hop.arrived_ns - hop.stored_ns, impossible) == (None, -S - S // 4, 1)
    assert measure(OWN + FIRST + b"Choria-SR-Source: nonsense\r\n\r\n") == ([], 2)
    assert measure(OWN + b"\r\n", b"1", S) == ([], 0)


def test_hop_that_claims_to_be_the_copiers_own_is_not_measured() -> None:
    measured, impossible = measure(OWN + SECOND + FIRST + SECOND + b"\r\n", b"1", (T0 + 60) * S)
    assert ([hop.name for hop in measured], impossible) == (["london", "region"], 1)


@given(
    st.lists(st.tuples(st.sampled_from(["T", "T" * 300]), st.integers(0, 10**21), st.integers(0, 10**14)), max_size=40),
    st.integers(0, 10**11),
    st.sampled_from([T0 * S, 2**63 - 1]),
)
def test_hops_fit_their_columns_whatever_a_publisher_writes(
    origins: list[tuple[str, int, int]], sent: int, arrived_ns: int
) -> None:
    lines = (f"Choria-SR-Source: {name} {n} R N{at} {ms}\r\n" for at, (name, n, ms) in enumerate(origins))
    measured, impossible = measure(OWN + "".join(lines).encode() + b"\r\n", b"%d" % sent, arrived_ns)
    assert len(measured) <= 8
    assert len(measured) + impossible == len(origins)
    for hop in measured:
        assert 0 <= hop.stored_ns <= min(hop.arrived_ns + 3600 * S, 2**63 - 1)
        assert 0 <= (hop.sent_ns or 0) <= min(arrived_ns + 3600 * S, 2**63 - 1)
        assert max(len(hop.name), len(hop.stream)) <= 255


def test_heartbeat_is_detected_by_its_header_and_has_no_sender() -> None:
    assert is_heartbeat("hb.a", OWN + b"\r\n")
    assert not is_heartbeat("a", b"NATS/1.0\r\nX: Choria-SR-Subject: a\r\n\r\n")
    assert inspect(SubjectToken(-1), None, "hb.a", OWN + b"\r\n", b"1") == (None, True)
    assert inspect(SubjectToken(-1), None, "hb.a", b"", b"1") == ("hb.a", False)


def test_heartbeat_is_known_by_its_subject_after_each_rewriting() -> None:
    beat = b"NATS/1.0\r\nChoria-SR-Subject: choria.heartbeat.eu.london\r\n"
    for subject in ("choria.heartbeat.eu.london", "copy.choria.heartbeat.eu.london"):
        assert is_heartbeat(subject, beat + b"\r\n")
        assert is_heartbeat(subject, beat + FIRST + b"\r\n")
    for subject in ("heartbeat.eu.london", "copy.heartbeat.eu.london"):
        assert is_heartbeat(subject, beat + FIRST + b"\r\n")
        assert not is_heartbeat(subject, beat + b"\r\n")


@given(st.lists(st.sampled_from(["choria", "heartbeat", "eu", "london", "web1", "com"]), min_size=1, max_size=6))
def test_node_on_its_own_subject_sends_no_heartbeat_of_a_site(tokens: list[str]) -> None:
    named = ["choria", "heartbeat", "london"]
    beat = b"NATS/1.0\r\nChoria-SR-Subject: choria.heartbeat.london\r\n"
    assert is_heartbeat(".".join(tokens), beat + b"\r\n") is (tokens[-3:] == named)
    assert not is_heartbeat("registration.web.london", beat + FIRST + b"\r\n")
