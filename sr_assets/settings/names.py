"""The types of names: sites, streams, subjects, headers, fields of a message.

A reader returns the value for Settings, or raises ValueError with the mistake and the allowed values.
"""

import re
from typing import Annotated
from urllib.parse import quote

from pydantic import InstanceOf

from sr_assets.domain import subjects
from sr_assets.domain.senders import HeaderName, JsonField, SubjectToken, parse_path
from sr_assets.settings.values import Value, read_text, shown

#: Prefix of the placeholder that `import` writes for an unknown stream.
PLACEHOLDER = "STREAM-THAT-TAKES "


def asset_name(text: str) -> str:
    """Make a name fit for asset keys, groups, jobs and sensors: characters outside `A-Za-z0-9_` become `_`."""
    return re.sub(r"[^A-Za-z0-9_]", "_", text)


def read_site_name(value: object) -> str:
    """Check a name that becomes a folder, a part of a header value and a part of message ids."""
    name = read_text(value)
    # The publication's folder has the percent-encoded name.
    if name.startswith(".") or re.search(r"[\s/\\*>]", name) or len(name.encode()) > 200 or len(quote(name, "")) > 240:
        raise ValueError(
            f"{shown(name)} cannot be a name: no spaces, '/', '\\', '*', '>' or leading dot, at most 200 bytes, "
            "or 80 where they are not ASCII, because it names a folder"
        )
    return name


def read_stream_name(value: object) -> str:
    """Read a stream's name by the server's rules."""
    name = read_text(value)
    if name.startswith(PLACEHOLDER):
        raise ValueError(
            f"{shown(name)} is a placeholder of `import`; replace it by the stream that takes that subject"
        )
    if re.search(r"[\s.*>/\\]", name) or len(name) > 255:
        raise ValueError(
            f"{shown(name)} is not a stream name: no spaces, '.', '*', '>', '/' or '\\', at most 255 characters"
        )
    return name


def read_filter(value: object) -> str:
    """Read a subject with wildcards."""
    text = read_text(value)
    if not subjects.is_valid_filter(text):
        raise ValueError(
            f"{shown(text)} is not a subject filter: tokens separated by single dots, '*' for one token, "
            "'>' at the end for the rest, no spaces"
        )
    return text


def read_plain_subject(value: object) -> str:
    """Read a subject, or the beginning of one, without wildcards and a final dot."""
    text = read_text(value)
    if not subjects.is_valid_filter(text) or re.search(r"[*>]", text):
        raise ValueError(f"{shown(text)} is not a subject: tokens separated by single dots, no spaces or wildcards")
    return text


def read_domain(value: object) -> str:
    """Read the name of a JetStream domain, one token of a subject."""
    text = read_plain_subject(value)
    if "." in text or text in ("API", "$JS"):
        raise ValueError(f"{shown(text)} is not a JetStream domain; use one token without dots, such as hub")
    return text


def read_api_prefix(value: object) -> str:
    """Read the API prefix of another JetStream, such as `$JS.leaf.API`; a final dot is removed."""
    return read_plain_subject(read_text(value).removesuffix("."))


def read_prefix(value: object) -> str:
    """Read the beginning of a subject, with or without its final dot."""
    text = read_text(value)
    if not subjects.is_valid_filter(text.removesuffix(".")) or re.search(r"[*>]", text):
        raise ValueError(
            f"{shown(text)} is not the beginning of a subject: tokens separated by single dots, no wildcards"
        )
    return text


def read_remove(value: object) -> str:
    """Read a part of subjects: any sequence of characters."""
    text = read_text(value)
    if re.search(r"[\s*>]", text):
        raise ValueError(f"{shown(text)} cannot occur in a subject; it is literal text without spaces or wildcards")
    return text


def rewritten(pattern: str, prefix: str, remove: str) -> str:
    """Rewrite a subject, with or without wildcards, as messages are rewritten; raises ValueError if the result is
    invalid.
    """
    result = subjects.target_subject(pattern, prefix, remove)
    if not subjects.is_valid_filter(result):
        key, value = ("target_subject_remove", remove) if remove else ("target_subject_prefix", prefix)
        raise ValueError(
            f"{key}: {shown(value)} makes {shown(pattern)} into {shown(result)}: no subject may begin or end with "
            "a dot or have an empty token; remove an adjacent dot as well"
        )
    return result


def read_advisory_template(value: object) -> str:
    """Read a subject in which `%s` stands for the event and `%v` for the sender."""
    text = read_text(value)
    if re.search(r"%(?![sv])", text):
        raise ValueError(f"{shown(text)}: only %s (the event) and %v (the sender) are replaced")
    plain = re.sub(r"%[sv]", "x", text)
    if not subjects.is_valid_filter(plain) or re.search(r"[*>]", plain):
        raise ValueError(f"{shown(text)} is not a subject: tokens separated by single dots, no spaces or wildcards")
    return text


def read_json_path(value: object) -> tuple[str, ...]:
    """Read the path of a field in a JSON payload."""
    text = read_text(value)
    try:
        return parse_path(text)
    except ValueError as error:
        raise ValueError(
            f"{error}; use a.b for b inside a, a\\.b for a key with a dot or another special character, a.0 for the "
            "first element"
        ) from None


def read_json_field(value: object) -> JsonField:
    """Read the path of the field that names the sender."""
    read_json_path(value)
    return JsonField(read_text(value))


def read_header_name(value: object) -> HeaderName:
    name = read_text(value)
    if not re.fullmatch(r"[!-9;-~]+", name):
        raise ValueError(f"{shown(name)} is not a header name; use printable ASCII without spaces and colons")
    return HeaderName(name)


def read_subject_token(value: object) -> SubjectToken | None:
    """Read a token number; 0 means none, as in the Stream Replicator."""
    number = int(value) if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,4}", value) else value
    if not isinstance(number, int) or isinstance(number, bool) or number < -1:
        raise ValueError(f"{shown(value)} is not a token: 1 is the first, -1 the whole subject")
    return SubjectToken(number) if number else None


def read_identity(value: object) -> str:
    """Read the name of a host's certificate, which is also used in file names."""
    text = read_text(value)
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}", text):
        raise ValueError(f"{shown(text)} is not a certificate name; use letters, digits, '.', '_' and '-'")
    return text


SiteName = Annotated[str, Value(read_site_name, type="name")]
StreamName = Annotated[str, Value(read_stream_name, type="stream name")]
Filter = Annotated[str, Value(read_filter, type="subject, with wildcards")]
Subject = Annotated[str, Value(read_plain_subject, type="subject")]
Prefix = Annotated[str, Value(read_prefix, type="beginning of a subject")]
Remove = Annotated[str, Value(read_remove, type="part of a subject")]
AdvisoryTemplate = Annotated[str, Value(read_advisory_template, type="subject with `%s`, `%v`")]
Domain = Annotated[str, Value(read_domain, type="JetStream domain")]
ApiPrefix = Annotated[str, Value(read_api_prefix, type="subject")]
FieldPath = Annotated[tuple[str, ...], Value(read_json_path, type="path of a JSON field")]
SenderField = Annotated[InstanceOf[JsonField], Value(read_json_field, type="path of a JSON field")]
SenderHeader = Annotated[InstanceOf[HeaderName], Value(read_header_name, type="header name")]
SenderToken = Annotated[InstanceOf[SubjectToken] | None, Value(read_subject_token, type="number, -1 or more")]
Identity = Annotated[str, Value(read_identity, type="certificate name")]
