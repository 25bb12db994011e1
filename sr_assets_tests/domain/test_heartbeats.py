"""Heartbeats: the duration of each hop by the clocks of the streams, which may differ."""

from hypothesis import given
from hypothesis import strategies as st

from sr_assets.domain.heartbeats import Hop, hops, is_heartbeat
from sr_assets.domain.senders import SubjectToken, inspect

S = 1_000_000_000
T0 = 1_700_000_000
OWN = b"NATS/1.0\r\nChoria-SR-Originator: sr1\r\nChoria-SR-Subject: hb.a\r\n"
FIRST = b"Choria-SR-Source: CITY 7 LDN london %d\r\n" % (T0 * 1000 + 250)
SECOND = b"Choria-SR-Source: REGION 9 EU region %d\r\n" % (T0 * 1000 + 1250)


def test_hop_lasts_from_its_stream_time_to_the_next() -> None:
    block = OWN + FIRST + SECOND + b"\r\n"
    assert hops(block, b"%d" % T0, (T0 + 60) * S)[0] == [
        Hop("london", "CITY", "hb.a", "sr1", T0 * S, T0 * S + S // 4, T0 * S + S // 4 + S),
        Hop("region", "REGION", "hb.a", "sr1", T0 * S, T0 * S + S // 4 + S, (T0 + 60) * S),
    ]


def test_hop_shows_clock_differences_and_skips_invalid_values() -> None:
    (hop,), impossible = hops(OWN + FIRST + b"Choria-SR-Source: nonsense\r\n\r\n", b"soon", (T0 - 1) * S)
    assert (hop.sent_ns, hop.arrived_ns - hop.stored_ns, impossible) == (None, -S - S // 4, 1)
    assert hops(OWN + b"\r\n", b"1", S) == ([], 0)


@given(
    st.lists(st.tuples(st.sampled_from(["T", "T" * 300]), st.integers(0, 10**21), st.integers(0, 10**14)), max_size=40),
    st.integers(0, 10**11),
    st.sampled_from([T0 * S, 2**63 - 1]),
)
def test_hops_fit_their_columns_whatever_a_publisher_writes(
    origins: list[tuple[str, int, int]], sent: int, arrived_ns: int
) -> None:
    sources = "".join(f"Choria-SR-Source: {name} {number} R N {ms}\r\n" for name, number, ms in origins).encode()
    measured, impossible = hops(OWN + sources + b"\r\n", b"%d" % sent, arrived_ns)
    assert len(measured) <= 16
    assert len(measured) + impossible == len(origins)
    for hop in measured:
        times = [hop.stored_ns, hop.arrived_ns, hop.sent_ns or 0]
        assert all(0 <= ns <= min(arrived_ns + 3600 * S, 2**63 - 1) for ns in times)
        assert max(len(hop.name), len(hop.stream)) <= 255


def test_heartbeat_is_detected_by_its_header_and_has_no_sender() -> None:
    assert is_heartbeat(OWN + b"\r\n")
    assert not is_heartbeat(b"NATS/1.0\r\nX: Choria-SR-Subject: a\r\n\r\n")
    assert inspect(SubjectToken(-1), None, "hb.a", OWN + b"\r\n", b"1") == (None, True)
    assert inspect(SubjectToken(-1), None, "hb.a", b"", b"1") == ("hb.a", False)
