"""Text that somebody else wrote, such as a node's name, made harmless for the place that shows it."""

import re
from typing import Final

#: The characters with a meaning within a line, and those that make a bare address a link.
_MARKDOWN: Final = re.compile(r"[!#$&()*<>@\[\\\]^_`{|}~]|:(?=/)|(?<=www)\.", re.IGNORECASE)
#: What chat systems turn into a mention or a link, up to the character that must no longer follow.
_CHAT: Final = re.compile(r"@|\](?=\()|:(?=//)")
_CHAT_ENTITIES: Final = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
_WORD_JOINER: Final = "\N{WORD JOINER}"


def visible(text: str) -> str:
    """Return text without control characters: line breaks, terminal sequences and other invisible ones are escaped."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def markdown(text: str) -> str:
    """Return text that Markdown shows as it is, in one line: no image, link, code or HTML."""
    return _MARKDOWN.sub(r"\\\g<0>", visible(text))


def chat(text: str) -> str:
    """Return text that Slack, Mattermost and similar systems show as it is: no mention, no link."""
    return _CHAT.sub(rf"\g<0>{_WORD_JOINER}", text).translate(_CHAT_ENTITIES)
