"""Foreign text: Markdown, chats and terminals show it and do nothing else."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from sr_assets.domain.foreign_text import chat, markdown, visible

HOSTILE = (
    "![](https://evil/x.png)",
    "[log in](https://evil)",
    "<https://evil>",
    "https://evil",
    "www.evil.example",
    "<img src=x onerror=alert(1)>",
    "`code`",
    "a|b",
    "a\\|b",
    "**bold** ~~gone~~",
    "&lt;",
    "a\nb",
    "me@evil.example",
)
_TABLE = MarkdownIt("gfm-like", {"linkify": False})


@given(st.text(min_size=1) | st.sampled_from(HOSTILE))
@example("\\")
def test_markdown_shows_any_text_in_its_cell_as_it_is(text: str) -> None:
    tokens = _TABLE.parse(f"| node | x |\n| --- | --- |\n| {markdown(text)} | 1 |\n")
    cell, last = [token for token in tokens if token.type == "inline"][2:]
    assert last.content == "1"
    assert cell.children is not None
    assert {child.type for child in cell.children} <= {"text", "text_special"}
    assert "".join(child.content for child in cell.children).strip() == visible(text).strip()


@pytest.mark.parametrize("text", ("https://evil", "www.evil.example", "WWW.evil.example", "me@evil.example"))
def test_markdown_makes_no_link_of_an_address(text: str) -> None:
    assert not any(address in markdown(text).lower() for address in ("https:", "www.", "e@"))


@given(st.text() | st.sampled_from(HOSTILE))
def test_chat_text_has_no_mention_and_no_link(text: str) -> None:
    shown = chat(text)
    assert not any(part in shown for part in ("<", ">", "](", "://"))
    assert shown.count("@") == shown.count("@\N{WORD JOINER}")


@given(st.text())
def test_visible_text_is_one_line_without_control_characters(text: str) -> None:
    assert visible(text).isprintable()
