"""What was read of a source whose store was put back, from what it held and what the runs said."""

import re
from dataclasses import replace

from sr_assets_tests.reference import Rules, Seen, by_field, expect
from sr_assets_tests.source_rollback import Past

SECOND = 10**9
T0 = 1_700_000_000 * SECOND
BEGUN = (
    "LONDON/S: source stream S {how}: it went back, or the state was edited; going on at 1 as beginning {number} (recopy);"
    " read until {last}, stored 2023-11-14T22:{read}.000000000Z; silence is known until 2023-11-14T22:{known}.000000000Z\n"
)
BLIND = (
    "LONDON/S: messages of the time from 2023-11-14T22:{since}.000000000Z to 2023-11-14T22:{until}.000000000Z were gone"
    " before they were read: no silence is counted then (1 holes)\n"
)


def held(*seconds: int) -> list[Seen]:
    return [
        Seen(sequence, T0 + second * SECOND, "S.m", b"", b'{"sender": "n"}')
        for sequence, second in enumerate(seconds, 1)
    ]


# Message 3 of the first store was read and message 4 lost; of the second store nothing was lost but the time.
FIRST, SECOND_STORE, NOW = held(0, 1, 2, 3), held(0, 1, 10, 11), held(0, 1, 10, 20)
LOG = (
    BEGUN.format(how="ends at 2, before 9, which was read", number=1, last=3, read="13:22", known="13:22")
    + BEGUN.format(how="ends at 2, before 9, which was read", number=1, last=3, read="13:22", known="13:22")
    + BLIND.format(since="13:22", until="13:30")
    + BEGUN.format(
        how="holds another message 4 than the one that was read", number=2, last=4, read="13:31", known="13:32"
    )
    + BLIND.format(since="13:32", until="13:40")
)


def test_what_was_read_before_each_beginning_is_known_from_the_last_message() -> None:
    past = Past.of("S", [FIRST, SECOND_STORE], LOG)
    assert [
        (message.beginning, message.sequence, (message.stored_ns - T0) // SECOND) for message in past.read(NOW)
    ] == [
        *((0, 1, 0), (0, 2, 1), (0, 3, 2)),
        *((1, 1, 0), (1, 2, 1), (1, 3, 10), (1, 4, 11)),
        *((2, 1, 0), (2, 2, 1), (2, 3, 10), (2, 4, 20)),
    ]
    assert past.unread(NOW) == [replace(FIRST[3], beginning=0)]
    assert list(past.misjudged(NOW)) == []
    assert Past.of("OTHER", [], LOG).read(NOW) == NOW


def test_a_source_of_which_nothing_was_read_can_have_gone_back_too() -> None:
    log = BEGUN.format(how="ends at 0, before 5", number=1, last=0, read="13:22", known="13:22")
    never = re.sub(r"2023\S+Z", "never", log)
    past = Past.of("S", [FIRST], never)
    assert [(message.beginning, message.sequence) for message in past.read(NOW)] == [(1, 1), (1, 2), (1, 3), (1, 4)]
    assert past.known_ns == [0]


def test_blind_time_that_lacks_a_lost_message_or_has_one_that_was_read_is_seen() -> None:
    late = Past.of("S", [FIRST, SECOND_STORE], LOG.replace(BLIND.format(since="13:22", until="13:30"), ""))
    assert [text.split(", ")[-1] for text in late.misjudged(NOW)] == ["not in blind time"]
    wide = Past.of("S", [FIRST, SECOND_STORE], LOG.replace("from 2023-11-14T22:13:32", "from 2023-11-14T22:13:30"))
    assert [text.split(", ")[-1] for text in wide.misjudged(NOW)] == ["in blind time"]


def test_what_is_read_again_is_no_news_and_lost_time_no_silence() -> None:
    past = Past.of("S", [FIRST, SECOND_STORE], LOG)
    rules = Rules("R", "LONDON", "S", 6 * SECOND, 3 * SECOND, "sender", by_field)
    read = past.read(NOW)
    expected = expect(rules, read, T0 + 20 * SECOND, past.blind, past.known_ns)
    assert [advisory["event"] for advisory in expected.advisories] == ["new"]
    without = expect(rules, read, T0 + 20 * SECOND, (), past.known_ns)
    assert [advisory["event"] for advisory in without.advisories] == ["new", *("timeout", "expire", "new") * 2]


def test_what_a_batch_may_have_copied_before_it_was_cut_off_includes_what_was_put_back() -> None:
    log = BEGUN.format(how="ends at 2, before 9, which was read", number=1, last=1, read="13:20", known="13:20")
    past = Past.of("S", [FIRST], log)
    assert [message.sequence for message in past.unread(SECOND_STORE)] == [3, 4]
    assert past.beyond() == [replace(message, beginning=0) for message in FIRST[1:]]
