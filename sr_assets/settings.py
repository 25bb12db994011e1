"""The configuration: one YAML file and the environment → frozen, validated Settings; the only reader of either.

Here: the public records, durations and URLs, the raw shape of the file with the rules of each key, the contradictions
between keys. The file is the Stream Replicator's own, with a few keys more. Not here: anything that needs a connection.
What only a server can tell (does the source exist, what are its subjects) is asked by `check --connect` and by a run.
"""

import difflib
import hashlib
import ipaddress
import json
import math
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self
from urllib.parse import parse_qsl, unquote

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, InstanceOf, ValidationError, model_validator

from sr_assets.domain import subjects
from sr_assets.domain.errors import ConfigurationError
from sr_assets.domain.positions import parse_rfc3339_ns
from sr_assets.domain.senders import HeaderName, JsonField, SubjectToken, parse_path
from sr_assets.domain.tracking import Policy

DEFAULT_CONFIG = Path("conf/replication.yaml")
SECOND_NS = 1_000_000_000
MINUTE_NS = 60 * SECOND_NS
HOUR_NS = 60 * MINUTE_NS
MEBIBYTE = 1 << 20

Order = Literal["stream", "sender", "none"]
OnSourceReset = Literal["stop", "recopy", "skip_to_now"]
OnTargetReset = Literal["continue", "stop"]
OnPoison = Literal["park", "stop"]


# ---------------------------------------------------------------------------------------------------- public records


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """How to reach one cluster: `servers` are `host:port` (IPv6 in brackets) without credentials."""

    servers: tuple[str, ...]
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    connect_timeout_seconds: float = 5.0

    @property
    def label(self) -> str:
        """The servers, as messages and logs may show them."""
        return ",".join(self.servers)

    def same_as(self, other: "ClusterSettings") -> bool:
        """Tell whether both name a common server with the same credentials; another account is another place."""
        ours, theirs = ({_canonical(server) for server in cluster.servers} for cluster in (self, other))
        credentials = (self.user, self.password, self.token)
        return not ours.isdisjoint(theirs) and credentials == (other.user, other.password, other.token)


@dataclass(frozen=True, slots=True)
class Start:
    """Where an entry without a position begins; `value` is a sequence, a time in unix ns, a delta in ns, or 0."""

    kind: Literal["all", "end", "sequence", "time", "delta"]
    value: int = 0


@dataclass(frozen=True, slots=True)
class AdvisorySettings:
    """Where transitions are announced; `reliable` None means: JetStream when a stream takes the subject."""

    subject: str
    reliable: bool | None
    cluster: Literal["source", "target"]


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """One configured entry: what is copied from where to where, and how its senders are sampled and tracked."""

    replicator: str
    name: str
    stream: str
    source: ClusterSettings
    target: ClusterSettings
    target_stream: str
    prefix: str = ""
    remove: str = ""
    filter_subject: str | None = None
    start: Start = Start("all")
    max_age_ns: int | None = None
    finder: JsonField | HeaderName | SubjectToken | None = None
    force_path: tuple[str, ...] | None = None
    policy: Policy | None = None
    advisory: AdvisorySettings | None = None
    workers: int = 1
    order: Order = "stream"
    on_source_reset: OnSourceReset = "stop"
    on_target_reset: OnTargetReset = "continue"
    on_poison: OnPoison = "park"
    batch_messages: int = 50_000
    batch_bytes: int = 64 * MEBIBYTE
    create_target: bool = True
    ephemeral: bool = False
    retired_retention_ns: int | None = None

    @property
    def asset_prefix(self) -> list[str]:
        """The first two parts of this entry's asset keys."""
        return [asset_name(self.name), asset_name(self.stream)]

    @property
    def tracked(self) -> bool:
        """Tell whether senders are sampled and their availability followed."""
        return self.policy is not None

    @property
    def label(self) -> str:
        """`name/stream`, the pair that is unique in a configuration."""
        return f"{self.name}/{self.stream}"

    def target_pattern(self, pattern: str) -> str:
        """Rewrite one of the source's subjects, wildcards allowed, as its messages will be rewritten.

        Raises ConfigurationError when the result is no subject: for streams without a filter only the source's own
        subjects can tell, so whoever knows them asks here before anything is copied.
        """
        try:
            return _rewritten(pattern, self.prefix, self.remove)
        except ValueError as error:
            raise ConfigurationError(f"stream {self.stream!r} (name {self.name!r}): {error}") from None


@dataclass(frozen=True, slots=True, repr=False)
class SparkSettings:
    """Where Spark runs (`connect-local`, `classic`, `sc://…`, `spark://…`) and its extra configuration."""

    mode: str = "connect-local"
    config: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def public(self) -> dict[str, Any]:
        """What may be shown: the mode without its parameters, and no value whose key sounds secret."""
        secret = re.compile(r"secret|password|token|credential|key", re.IGNORECASE)
        shown = {key: value for key, value in self.config.items() if not secret.search(key)}
        return {"mode": self.mode.partition(";")[0].rpartition("@")[2], "config": shown}

    def __repr__(self) -> str:
        return f"SparkSettings({self.public})"


@dataclass(frozen=True, slots=True)
class SensorSettings:
    """How often a site's sensor looks, and how far the source must be ahead before it asks for a run."""

    interval_ns: int = 30 * SECOND_NS
    lag_messages: int = 1
    lag_ns: int = 0


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a deployment is configured with; `warnings` name what was accepted but has no effect."""

    replicator: str
    home: Path
    streams: tuple[StreamSettings, ...]
    spark: SparkSettings = field(default_factory=SparkSettings)
    sensor: SensorSettings = SensorSettings()
    run_budget_ns: int = 5 * MINUTE_NS
    linger_ns: int = 60 * SECOND_NS
    snapshots_retention_ns: int | None = None
    loglevel: Literal["debug", "info", "warn", "error"] = "info"
    logfile: Path | None = None
    warnings: tuple[str, ...] = ()

    @property
    def sites(self) -> dict[str, tuple[StreamSettings, ...]]:
        """The entries of each site, sites and entries in the order of the file."""
        names = dict.fromkeys(stream.name for stream in self.streams)
        return {name: tuple(stream for stream in self.streams if stream.name == name) for name in names}

    @property
    def digest(self) -> str:
        """The sha256 of what takes effect, secrets left out: equal digests, equal behaviour."""
        effective = {key: value for key, value in _plain(self).items() if key not in ("home", "logfile", "warnings")}
        return hashlib.sha256(json.dumps(effective, sort_keys=True).encode()).hexdigest()

    def find(self, name: str) -> tuple[StreamSettings, ...]:
        """Return the entries called `name`: a stream, of every site that has it, or `name/stream`, which is one.

        Raises ConfigurationError when there is none.
        """
        found = tuple(stream for stream in self.streams if name in (stream.stream, stream.label))
        if not found:
            labels = [stream.label for stream in self.streams]
            near = difflib.get_close_matches(name, labels + [stream.stream for stream in self.streams], n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigurationError(f"no stream {_shown(name)} is configured; {hint}configured: {', '.join(labels)}")
        return found


def asset_name(text: str) -> str:
    """Make a name fit for asset keys, groups, jobs and sensors: everything outside `A-Za-z0-9_` becomes `_`."""
    return re.sub(r"[^A-Za-z0-9_]", "_", text)


def _plain(value: Any) -> Any:
    """Reduce records to JSON, without the fields that their repr hides."""
    if isinstance(value, SparkSettings):
        return value.public
    if is_dataclass(value):
        shown = {item.name: _plain(getattr(value, item.name)) for item in fields(value) if item.repr}
        return {"is": type(value).__name__, **shown}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


# ------------------------------------------------------------------------------------------------ values of one key
# Each returns what Settings hold, or raises ValueError with what is wrong and what is allowed; the key is put in front.

# A month and a year are the forerunner's: 30 and 365 days.
_UNIT_NS = {
    "ms": SECOND_NS // 1000,
    "s": SECOND_NS,
    "m": MINUTE_NS,
    "h": HOUR_NS,
    "d": 24 * HOUR_NS,
    "D": 24 * HOUR_NS,
    "w": 7 * 24 * HOUR_NS,
    "W": 7 * 24 * HOUR_NS,
    "M": 30 * 24 * HOUR_NS,
    "y": 365 * 24 * HOUR_NS,
    "Y": 365 * 24 * HOUR_NS,
}
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ms|[smhdDwWMyY])")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMG]i?B?|B)?", re.IGNORECASE)
_LONGEST_NS = (1 << 63) - 1


def parse_duration(text: str) -> int:
    """Read a duration such as `90s`, `12m`, `1.5d`, `1M` or a sum such as `1h30m`, in nanoseconds.

    Raises ConfigurationError for anything else, a bare number and a negative one included.
    """
    try:
        return _span(text)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


def _shown(value: object) -> str:
    """Show a value on one line, shortened; a URL in the wrong place keeps its login to itself."""
    text = re.sub(r"//.*@", "//***@", repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _span(value: object) -> int:
    allowed = "write a number and a unit (ms s m h d w M y), as in 90s, 12m, 1.5d, 1M, or a sum such as 1h30m"
    text = value.strip() if isinstance(value, str) else ""
    parts = _DURATION_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{_shown(value)} is not a duration: {allowed}")
    total = int(sum(Fraction(number.rstrip(".")) * _UNIT_NS[unit] for number, unit in parts))
    if total > _LONGEST_NS:
        raise ValueError(f"{_shown(value)} is too long: the longest is 292 years")
    return total


def _duration(value: object) -> int:
    total = _span(value)
    if total == 0:
        raise ValueError(f"{_shown(value)} must be longer than zero")
    return total


def _seconds(value: object) -> int:
    """Read plain seconds, or a duration, in nanoseconds."""
    plain = re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", str(value))
    return int(Fraction(plain[0]) * SECOND_NS) if plain else _span(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{_shown(value)} is not text: put it in quotes")  # noqa: TRY004  pydantic takes ValueError
    if not value.isprintable():
        raise ValueError(f"{_shown(value)} has control characters")
    return value


def _flag(value: object) -> bool:
    words = {"true": True, "false": False}  # a flag from the environment arrives as text
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise ValueError(f"{_shown(value)} is neither true nor false")


def _whole(smallest: int) -> BeforeValidator:
    def whole(value: object) -> int:
        number = value
        if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,20}", value):
            number = int(value)
        if not isinstance(number, int) or isinstance(number, bool) or not smallest <= number < 1 << 64:
            raise ValueError(f"{_shown(value)} is not a whole number, {smallest} or more")
        return number

    return BeforeValidator(whole)


def _bytes(smallest: int) -> BeforeValidator:
    def size(value: object) -> int:
        found = None if isinstance(value, bool) else _SIZE.fullmatch(str(value).strip())
        if found is None:
            raise ValueError(f"{_shown(value)} is not a size: write bytes, or a number with KiB, MiB or GiB")
        unit = (found[2] or "B").upper()
        step = 1024 if "I" in unit else 1000
        factor: int = step ** "BKMG".index(unit[0])
        total = math.ceil(Fraction(found[1]) * factor)
        if total < smallest:
            raise ValueError(f"{_shown(value)} must be {smallest} byte or more")
        return total

    return BeforeValidator(size)


def _choice(*allowed: str) -> BeforeValidator:
    def choice(value: object) -> str:
        if not isinstance(value, str) or value.lower() not in allowed:
            raise ValueError(f"{_shown(value)} is not one of {', '.join(allowed)}")
        return value.lower()

    return BeforeValidator(choice)


def _unsupported(remedy: str) -> BeforeValidator:
    def refuse(value: object) -> None:
        if value not in ({}, [], False):
            raise ValueError(f"is not supported in this version: {remedy}")

    return BeforeValidator(refuse)


def _site_name(value: object) -> str:
    """Check a name that becomes a folder, a part of a header value and a part of message ids."""
    name = _text(value)
    if name.startswith(".") or re.search(r"[\s/\\*>]", name) or len(name.encode()) > 200:
        raise ValueError(
            f"{_shown(name)} cannot be a name: no spaces, '/', '\\', '*', '>' or leading dot, at most 200 bytes, "
            "because it names a folder"
        )
    return name


def _stream_name(value: object) -> str:
    name = _text(value)
    if re.search(r"[\s.*>/\\]", name) or len(name) > 255:
        raise ValueError(
            f"{_shown(name)} cannot name a stream: no spaces, '.', '*', '>', '/' or '\\', at most 255 characters"
        )
    return name


def _filter(value: object) -> str:
    text = _text(value)
    if not subjects.is_valid_filter(text):
        raise ValueError(
            f"{_shown(text)} is not a subject filter: tokens separated by single dots, '*' for one token, "
            "'>' at the end for the rest, no spaces"
        )
    return text


def _prefix(value: object) -> str:
    text = _text(value)
    if not subjects.is_valid_filter(text.removesuffix(".")) or re.search(r"[*>]", text):
        raise ValueError(f"{_shown(text)} cannot begin a subject: tokens separated by single dots, no wildcards")
    return text


def _remove(value: object) -> str:
    text = _text(value)
    if re.search(r"[\s*>]", text):
        raise ValueError(f"{_shown(text)} occurs in no subject: it is taken literally, without spaces or wildcards")
    return text


def _advisory_template(value: object) -> str:
    text = _text(value)
    if re.search(r"%(?![sv])", text):
        raise ValueError(f"{_shown(text)}: only %s (the event) and %v (the sender) are filled in")
    plain = re.sub(r"%[sv]", "x", text)
    if not subjects.is_valid_filter(plain) or re.search(r"[*>]", plain):
        raise ValueError(f"{_shown(text)} is not a subject: tokens separated by single dots, no spaces or wildcards")
    return text


def _json_path(value: object) -> tuple[str, ...]:
    text = _text(value)
    try:
        return parse_path(text)
    except ValueError:
        raise ValueError(
            f"{_shown(text)} has an empty segment: write a.b for b inside a, a\\.b for a key with a dot, a.0 for the "
            "first element"
        ) from None


def _json_field(value: object) -> JsonField:
    _json_path(value)
    return JsonField(_text(value))


def _header_name(value: object) -> HeaderName:
    name = _text(value)
    if not re.fullmatch(r"[!-9;-~]+", name):
        raise ValueError(f"{_shown(name)} is not a header name: printable ASCII without spaces and colons")
    return HeaderName(name)


def _subject_token(value: object) -> SubjectToken | None:
    """Read a token number; 0 is the forerunner's way to say none."""
    number = int(value) if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,4}", value) else value
    if not isinstance(number, int) or isinstance(number, bool) or number < -1:
        raise ValueError(f"{_shown(value)} is not a token: 1 is the first, -1 the whole subject")
    return SubjectToken(number) if number else None


def _time(value: object) -> int:
    text = _text(value)
    try:
        return parse_rfc3339_ns(text)
    except ValueError:
        raise ValueError(f"{_shown(text)} is not a time: write RFC 3339, as in 2026-01-31T12:00:00Z") from None


def _spark_mode(value: object) -> str:
    text = _text(value)
    if text not in ("connect-local", "classic") and not re.match(r"(sc|spark)://[^/;]", text):
        raise ValueError("must be connect-local, classic, sc://host:port or spark://host:port")
    return text


def _spark_config(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError("must be a mapping of Spark's configuration keys")  # noqa: TRY004  as in _text
    for key, item in value.items():
        if not (isinstance(key, str) and isinstance(item, (str, int, float))):
            raise ValueError(f"{_shown(key)} must be text with one value")  # noqa: TRY004  as in _text
    return {key: str(item).lower() if isinstance(item, bool) else str(item) for key, item in value.items()}


def _one_line_path(value: object) -> Path:
    text = _text(value)
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"{_shown(text)}: no such user's home") from None


def parse_cluster(value: object) -> ClusterSettings:
    """Read comma-separated servers: `[nats://][user:password@|token@]host[:port][?connect_timeout=5s]`.

    User, password and token are percent-decoded. Raises ValueError, which never shows any part of the value: a
    misplaced character would make a password look like a host.
    """
    if not isinstance(value, str):
        raise ValueError("must be text such as nats://host:4222")  # noqa: TRY004  as in _text
    parts = [_server(part.strip()) for part in value.split(",")]
    credentials = {login for _, login, _ in parts if login != (None, None, None)} or {(None, None, None)}
    timeouts = {timeout for _, _, timeout in parts if timeout is not None} or {5.0}
    if len(credentials) > 1:
        raise ValueError("all servers of one cluster must have the same user and password, or token")
    if len(timeouts) > 1:
        raise ValueError("connect_timeout differs between the servers")
    (user, password, token), timeout = credentials.pop(), timeouts.pop()
    return ClusterSettings(tuple(dict.fromkeys(server for server, _, _ in parts)), user, password, token, timeout)


_Login = tuple[str | None, str | None, str | None]


def _server(text: str) -> tuple[str, _Login, float | None]:
    """Split one server's URL into `host:port`, (user, password, token) and the connect timeout in seconds."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "nats", text
    if scheme.lower() in ("tls", "ws", "wss"):
        raise ValueError(f"{scheme.lower()}:// is not supported in this version: use nats:// over a protected network")
    if scheme.lower() != "nats":
        raise ValueError("the URL must begin with nats:// or be host:port")
    # As in RFC 3986 the authority ends at the first of these, so a password must have them percent-encoded.
    authority, tail = re.fullmatch(r"([^/?#]*)(.*)", rest, re.DOTALL).groups()  # type: ignore[union-attr]
    path, _, query = tail.partition("?")
    if path not in ("", "/"):
        raise ValueError(
            "nothing but ?connect_timeout=5s may follow host:port ('/', '?', '#' in a password: %2F %3F %23)"
        )
    login, _, address = authority.rpartition("@")
    return _address(address), _login(login, "@" in authority), _connect_timeout(query)


def _address(text: str) -> str:
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_][A-Za-z0-9_.-]*)(?::([0-9]{1,5}))?", text)
    if found is None:
        raise ValueError("a server must be host, host:port or [IPv6]:port (a ',' in a password: %2C)")
    host, port = found[1].lower(), int(found[2] or 4222)
    if host.startswith("["):
        try:
            host = f"[{ipaddress.IPv6Address(host[1:-1])}]"
        except ValueError:
            raise ValueError("the address in brackets is not IPv6") from None
    if not 0 < port < 1 << 16:
        raise ValueError("the port must be between 1 and 65535")
    return f"{host}:{port}"


def _login(text: str, present: bool) -> _Login:
    user, separator, password = text.partition(":")
    if present and not user:
        raise ValueError("there is no user or token before the @")
    if separator:
        return unquote(user), unquote(password), None
    return None, None, unquote(user) or None


def _connect_timeout(query: str) -> float | None:
    timeout = None
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key.lower() in ("credentials", "jwt", "nkey"):
            raise ValueError(f"option {key} is not supported in this version: use user:password@ or token@")
        if key.lower() in ("tls_handshake_first", "insecure"):
            raise ValueError(f"option {key} is not supported in this version: TLS is not; take the option out")
        if key.lower() != "connect_timeout":
            raise ValueError("unknown option in the URL; allowed: connect_timeout")
        try:
            timeout = _duration(value) / SECOND_NS
        except ValueError:
            raise ValueError("connect_timeout in the URL is not a duration such as 5s") from None
    return timeout


def _canonical(server: str) -> str:
    """Give this machine's loopback names one spelling, so that they compare equal."""
    host, _, port = server.rpartition(":")
    return f"localhost:{port}" if host in ("127.0.0.1", "[::1]") else server


def _rewritten(pattern: str, prefix: str, remove: str) -> str:
    result = subjects.target_subject(pattern, prefix, remove)
    if not subjects.is_valid_filter(result):
        key, value = ("target_subject_remove", remove) if remove else ("target_subject_prefix", prefix)
        raise ValueError(
            f"{key}: {_shown(value)} makes {_shown(pattern)} into {_shown(result)}: no subject may begin or end with "
            "a dot or have an empty token; take a neighbouring dot out as well"
        )
    return result


# ---------------------------------------------------------------------------------------------- the shape of the file

Text = Annotated[str, BeforeValidator(_text)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Span = Annotated[int, BeforeValidator(_span)]
Duration = Annotated[int, BeforeValidator(_duration)]
SiteName = Annotated[str, BeforeValidator(_site_name)]
StreamName = Annotated[str, BeforeValidator(_stream_name)]
Url = Annotated[InstanceOf[ClusterSettings], BeforeValidator(parse_cluster)]
File = Annotated[Path, BeforeValidator(_one_line_path)]

_TLS = "take the block out and connect with nats:// over a protected network"
_CHORIA = "take the block out and put user:password@ or token@ into the URL"
NoTls = Annotated[None, _unsupported(_TLS)]
NoChoria = Annotated[None, _unsupported(_CHORIA)]
NoElection = Annotated[None, _unsupported("take it out and run one instance; a site's lock keeps a second run waiting")]
NoHeartbeats = Annotated[None, _unsupported("take the block out; heartbeats have to be sent by another program")]
NoFeeds = Annotated[None, _unsupported("take the list out")]


class _Raw(BaseModel):
    """A mapping of the file: keys in any case, none twice, none unknown; null and empty text are not set."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise ValueError("must be a mapping of keys to values")  # noqa: TRY004  as in _text
        known: dict[str, Any] = {}
        for key, value in data.items():
            name = key.lower() if isinstance(key, str) else key
            if name not in cls.model_fields:
                near = difflib.get_close_matches(str(name), cls.model_fields, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise ValueError(f"unknown key {_shown(key)}; {hint}allowed: {', '.join(cls.model_fields)}")
            if name in known:
                raise ValueError(f"key {_shown(key)} is there twice (keys match in any case)")
            known[name] = value
        return {key: value for key, value in known.items() if value is not None and value != ""}


class _RawAdvisory(_Raw):
    subject: Annotated[str, BeforeValidator(_advisory_template)]
    reliable: Flag | None = None
    cluster: Annotated[Literal["source", "target"], _choice("source", "target")] = "source"


class _RawSpark(_Raw):
    mode: Annotated[str, BeforeValidator(_spark_mode)] = "connect-local"
    config: Annotated[dict[str, str], BeforeValidator(_spark_config)] = {}


class _RawSensor(_Raw):
    interval: Duration = 30 * SECOND_NS
    lag_messages: Annotated[int, _whole(1)] = 1
    lag_seconds: Annotated[int, BeforeValidator(_seconds)] = 0

    @model_validator(mode="after")
    def _not_hectic(self) -> Self:
        if self.interval < SECOND_NS:
            raise ValueError("interval: must be 1s or more")
        return self


class _RawSnapshots(_Raw):
    retention: Duration | None = None


class _RawStream(_Raw):
    stream: StreamName
    name: SiteName | None = None
    source_url: Url
    target_url: Url
    target_stream: StreamName | None = None
    target_subject_prefix: Annotated[str, BeforeValidator(_prefix)] = ""
    target_subject_remove: Annotated[str, BeforeValidator(_remove)] = ""
    filter_subject: Annotated[str, BeforeValidator(_filter)] | None = None
    no_target_create: Flag | None = None
    create_target: Flag | None = None
    ephemeral: Flag = False
    target_initiated: Flag = False
    start_sequence: Annotated[int, _whole(0)] = 0
    start_time: Annotated[int, BeforeValidator(_time)] | None = None
    start_delta: Duration | None = None
    start_at_end: Flag = False
    max_age: Duration | None = None
    inspect_field: Annotated[InstanceOf[JsonField], BeforeValidator(_json_field)] | None = None
    inspect_header: Annotated[InstanceOf[HeaderName], BeforeValidator(_header_name)] | None = None
    inspect_subject_token: Annotated[InstanceOf[SubjectToken] | None, BeforeValidator(_subject_token)] = None
    inspect_force_field: Annotated[tuple[str, ...], BeforeValidator(_json_path)] | None = None
    inspect_duration: Duration | None = None
    warn_duration: Duration | None = None
    size_trigger: Annotated[int, _bytes(0)] | None = None
    advisory: _RawAdvisory | None = None
    retired_retention: Duration | None = None
    workers: Annotated[int, _whole(1)] = 1
    order: Annotated[Order, _choice("stream", "sender", "none")] | None = None
    on_source_reset: Annotated[OnSourceReset, _choice("stop", "recopy", "skip_to_now")] = "stop"
    on_target_reset: Annotated[OnTargetReset, _choice("continue", "stop")] = "continue"
    on_poison: Annotated[OnPoison, _choice("park", "stop")] = "park"
    batch_messages: Annotated[int, _whole(1)] = 50_000
    batch_bytes: Annotated[int, _bytes(1)] = 64 * MEBIBYTE
    tls: NoTls = None
    source_tls: NoTls = None
    target_tls: NoTls = None
    choria: NoChoria = None
    source_choria: NoChoria = None
    target_choria: NoChoria = None
    leader_election_name: NoElection = None

    @property
    def finder(self) -> JsonField | HeaderName | SubjectToken | None:
        return self.inspect_field or self.inspect_header or self.inspect_subject_token

    @property
    def effective_order(self) -> Order:
        return self.order or ("stream" if self.workers == 1 else "sender")

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        _refuse_first(self._sampling_contradictions())
        _refuse_first(self._copying_contradictions())
        rewritten = _rewritten(self.filter_subject or ">", self.target_subject_prefix, self.target_subject_remove)
        self._refuse_loop(rewritten)
        self._refuse_advisory_into_source()
        return self

    def _sampling_contradictions(self) -> Iterable[tuple[bool, str]]:
        modes = [key for key in ("inspect_field", "inspect_header", "inspect_subject_token") if getattr(self, key)]
        sampled, interval, warning = bool(modes), self.inspect_duration, self.warn_duration
        yield len(modes) > 1, f"{' and '.join(modes)}: only one way to find the sender can be used"
        yield sampled and interval is None, f"{''.join(modes[:1])}: needs inspect_duration to say how often to copy"
        one = "inspect_field, inspect_header or inspect_subject_token"
        yield not sampled and interval is not None, f"inspect_duration: needs one of {one} to find the sender"
        for key in ("warn_duration", "inspect_force_field", "size_trigger", "advisory", "retired_retention"):
            alone = getattr(self, key) is not None and not sampled
            yield alone and getattr(self, key) != 0, f"{key}: needs sampling, that is inspect_duration and one of {one}"
        if warning is not None and interval is not None:
            both = f"{warning / SECOND_NS:g}s must be shorter than inspect_duration ({interval / SECOND_NS:g}s)"
            yield warning >= interval, f"warn_duration: {both}"
        if interval is not None:
            yield interval < 2, "inspect_duration: must be longer"
        yield self.target_initiated and sampled, "target_initiated: cannot be used with sampling; take it out"

    def _copying_contradictions(self) -> Iterable[tuple[bool, str]]:
        order, both = self.effective_order, self.create_target is not None and self.no_target_create is not None
        yield self.target_initiated and self.max_age is not None, "target_initiated: cannot be used with max_age"
        yield both and self.create_target == self.no_target_create, "create_target: contradicts no_target_create"
        yield self.workers > 1 and order == "stream", "order: 'stream' needs workers: 1; use sender or none"
        one = "inspect_field, inspect_header or inspect_subject_token"
        blind = self.workers > 1 and order == "sender" and self.finder is None
        yield blind, f"order: 'sender' (the default when workers > 1) needs one of {one}; or say order: none"

    def _refuse_loop(self, rewritten: str) -> None:
        """Refuse to copy a stream into itself, as far as the configuration alone can tell."""
        if not self.source_url.same_as(self.target_url):
            return
        where = f"is the cluster of source_url ({self.source_url.label})"
        if (self.target_stream or self.stream) == self.stream:
            raise ValueError(f"target_url: {where}, so {self.stream!r} would be copied into itself; set target_stream")
        # A filter of everything says nothing about what the source takes; subjects left as they are say it all.
        known = self.filter_subject not in (None, ">")
        if rewritten == (self.filter_subject or ">") or (
            known and subjects.overlaps(rewritten, self.filter_subject or "")
        ):
            raise ValueError(
                f"target_url: {where} and the subjects of both streams overlap ({_shown(rewritten)}); "
                "set target_subject_prefix or target_subject_remove so that they do not"
            )

    def _refuse_advisory_into_source(self) -> None:
        if self.advisory is None or self.advisory.cluster == "target" or self.filter_subject in (None, ">"):
            return
        # A sender may be several tokens, so from its token on anything can follow.
        head, sender, _ = self.advisory.subject.partition("%v")
        tokens = [*head.split(".")[:-1], ">"] if sender else head.split(".")
        pattern = ".".join("*" if "%s" in token else token for token in tokens)
        if subjects.overlaps(pattern, self.filter_subject or ""):
            raise ValueError(
                f"advisory.subject: {_shown(self.advisory.subject)} is taken by the tracked source stream itself "
                f"(filter_subject {_shown(self.filter_subject)}); use another subject"
            )


class _RawFile(_Raw):
    name: SiteName
    streams: list[_RawStream]
    state_store: File | None = None
    logfile: File | None = None
    loglevel: Annotated[Literal["debug", "info", "warn", "error"], _choice("debug", "info", "warn", "error")] = "info"
    monitor_port: Any = None
    profiling: Any = None
    spark: _RawSpark = _RawSpark()
    sensor: _RawSensor = _RawSensor()
    run_budget: Duration = 5 * MINUTE_NS
    linger: Span | None = None
    snapshots: _RawSnapshots = _RawSnapshots()
    tls: NoTls = None
    choria: NoChoria = None
    heartbeats: NoHeartbeats = None
    feeds: NoFeeds = None

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if not self.streams:
            raise ValueError("streams: is empty; at least one stream is needed")
        pairs = [(entry.name or self.name, entry.stream) for entry in self.streams]
        for place, (name, stream) in enumerate(pairs):
            if (name, stream) in pairs[:place]:
                raise ValueError(f"stream {stream!r} (name {name!r}): is there twice; give one entry another name")
        names = [name for name, _ in pairs]
        _refuse_collision(names, "name", "share a folder where case does not count", _folder)
        _refuse_collision(names, "name", "get the same asset group, job and sensor", asset_name)
        for site in dict.fromkeys(names):
            of_site = [stream for name, stream in pairs if name == site]
            _refuse_collision(of_site, f"name {site!r}: stream", "get the same asset keys", asset_name)
        return self


def _refuse_first(rules: Iterable[tuple[bool, str]]) -> None:
    for broken, message in rules:
        if broken:
            raise ValueError(message)


def _folder(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def _refuse_collision(values: Sequence[str], what: str, why: str, key: Callable[[str], str]) -> None:
    seen: dict[str, str] = {}
    for value in values:
        other = seen.setdefault(key(value), value)
        if other != value:
            raise ValueError(f"{what}: {other!r} and {value!r} {why}; rename one")


# ------------------------------------------------------------------------------------------------------------ loading


def load_settings(path: Path | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Read, check and complete the configuration: `path`, else SR_ASSETS_CONFIG, else `conf/replication.yaml`.

    Raises ConfigurationError, one line that names the file, the stream, the key and what is allowed; when several
    things are wrong it tells the first and how many more. No URL and no value from one is ever shown.
    """
    path = path or Path(environ.get("SR_ASSETS_CONFIG") or DEFAULT_CONFIG)
    tree = _read(path)
    try:
        raw = _RawFile.model_validate(
            _with_environment(tree, environ, lambda loc, problem: _refuse(path, tree, loc, problem))
        )
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        _refuse(path, tree, problems[0]["loc"], _problem(problems[0]) + more)
    return _settings(raw, environ)


class _Loader(yaml.SafeLoader):
    """YAML with every key once, and times left as text: their nanoseconds would be lost."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.composer.ComposerError(
                        None, None, f"key {_shown(key.value)} is there twice", key.start_mark
                    )
                seen.add(key.value)
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _read(path: Path) -> dict[Any, Any]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=_Loader)  # noqa: S506  a SafeLoader
    except OSError as error:
        hint = "; create it, or name another with SR_ASSETS_CONFIG" if isinstance(error, FileNotFoundError) else ""
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}{hint}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path}: is not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigurationError(f"{path}: is not valid YAML{where}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        # Control characters, impossible numbers or dates, endless nesting.
        raise ConfigurationError(
            f"{path}: is not valid YAML: it has characters or values YAML does not allow"
        ) from None
    if tree is None:
        raise ConfigurationError(f"{path}: is empty; it needs at least name and streams")
    if not isinstance(tree, dict):
        raise ConfigurationError(f"{path}: must be a mapping of keys such as name and streams")
    return tree


_Location = tuple[str | int, ...]


def _with_environment(
    value: Any, environ: Mapping[str, str], refuse: Callable[[_Location, str], NoReturn], loc: _Location = ()
) -> Any:
    """Replace every `${NAME}` in values by the environment's value; keys and numbers stay."""
    if len(loc) > 20:
        refuse(loc[:1], "is nested too deeply")
    if isinstance(value, dict):
        return {key: _with_environment(item, environ, refuse, (*loc, str(key))) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_environment(item, environ, refuse, (*loc, place)) for place, item in enumerate(value)]
    if not isinstance(value, str):
        return value

    def lookup(found: re.Match[str]) -> str:
        if not found[1]:
            refuse(loc, "has a '${' that does not begin ${NAME}")
        if found[1] not in environ:
            refuse(loc, f"environment variable {found[1]} is not set")
        return environ[found[1]]

    return re.sub(r"\$\{(?:([A-Za-z_][A-Za-z0-9_]*)\})?", lookup, value)


def _problem(error: Mapping[str, Any]) -> str:
    """Say in our words what pydantic found; our own validators' words are used as they are."""
    match error["type"]:
        case "value_error":
            return str(error["ctx"]["error"])
        case "missing":
            return "is required"
        case "list_type":
            return "must be a list, each entry beginning with '- '"
    return str(error["msg"])


def _refuse(path: Path, tree: Any, loc: _Location, problem: str) -> NoReturn:
    """Raise the error about `loc`, with a stream called by its name instead of its place in the list."""
    place, keys = [str(path)], loc
    if len(loc) > 1 and str(loc[0]).lower() == "streams":
        entry = _get(_get(tree, "streams"), loc[1])
        stream, name = _get(entry, "stream"), _get(entry, "name")
        called = f"stream {_shown(stream)}" if isinstance(stream, str) else f"streams entry {int(loc[1]) + 1}"
        place.append(called + (f" (name {_shown(name)})" if isinstance(name, str) else ""))
        keys = loc[2:]
    place.append(".".join(str(key) for key in keys))
    raise ConfigurationError(": ".join(part for part in (*place, problem) if part)) from None


def _get(container: Any, key: Any) -> Any:
    """Look into a raw tree, whatever it is, by key in any case or by place."""
    if isinstance(container, list) and isinstance(key, int):
        return container[key]
    if isinstance(container, dict):
        return next((value for name, value in container.items() if str(name).lower() == key), None)
    return None


def _settings(raw: _RawFile, environ: Mapping[str, str]) -> Settings:
    home = environ.get("SR_ASSETS_HOME") or raw.state_store or ".sr_assets"
    return Settings(
        replicator=raw.name,
        home=Path.cwd() / Path(home).expanduser(),
        streams=tuple(_stream(entry, raw.name) for entry in raw.streams),
        spark=SparkSettings(raw.spark.mode, raw.spark.config),
        sensor=SensorSettings(raw.sensor.interval, raw.sensor.lag_messages, raw.sensor.lag_seconds),
        run_budget_ns=raw.run_budget,
        linger_ns=2 * raw.sensor.interval if raw.linger is None else raw.linger,
        snapshots_retention_ns=raw.snapshots.retention,
        loglevel=raw.loglevel,
        logfile=raw.logfile,
        warnings=_warnings(raw),
    )


def _stream(raw: _RawStream, replicator: str) -> StreamSettings:
    return StreamSettings(
        replicator=replicator,
        name=raw.name or replicator,
        stream=raw.stream,
        source=raw.source_url,
        target=raw.target_url,
        target_stream=raw.target_stream or raw.stream,
        prefix=raw.target_subject_prefix,
        remove=raw.target_subject_remove,
        filter_subject=raw.filter_subject,
        start=_start(raw),
        max_age_ns=raw.max_age,
        finder=raw.finder,
        force_path=raw.inspect_force_field,
        policy=_policy(raw),
        advisory=_advisory(raw.advisory),
        workers=raw.workers,
        order=raw.effective_order,
        on_source_reset=raw.on_source_reset,
        on_target_reset=raw.on_target_reset,
        on_poison=raw.on_poison,
        batch_messages=raw.batch_messages,
        batch_bytes=raw.batch_bytes,
        create_target=not raw.no_target_create if raw.create_target is None else raw.create_target,
        ephemeral=raw.ephemeral,
        retired_retention_ns=raw.retired_retention,
    )


def _advisory(raw: _RawAdvisory | None) -> AdvisorySettings | None:
    return None if raw is None else AdvisorySettings(raw.subject, raw.reliable, raw.cluster)


def _start(raw: _RawStream) -> Start:
    """Choose where to begin; the first option that is set wins, in the forerunner's order."""
    if raw.start_at_end:
        return Start("end")
    if raw.start_sequence:
        return Start("sequence", raw.start_sequence)
    if raw.start_delta is not None:
        return Start("delta", raw.start_delta)
    return Start("all") if raw.start_time is None else Start("time", raw.start_time)


def _policy(raw: _RawStream) -> Policy | None:
    if raw.inspect_duration is None:
        return None
    warning_ns = raw.inspect_duration // 2 if raw.warn_duration is None else raw.warn_duration
    return Policy(raw.inspect_duration, warning_ns, raw.size_trigger or 0)


def _warnings(raw: _RawFile) -> tuple[str, ...]:
    patient = [entry.stream for entry in raw.streams if entry.target_initiated]
    notes = (
        (raw.monitor_port, "monitor_port has no effect in this version: there is no metrics port"),
        (raw.profiling, "profiling has no effect: there is no profiler"),
        (patient, f"target_initiated has no effect ({', '.join(patient)}): copying is always latency-tolerant"),
    )
    return tuple(note for condition, note in notes if condition)
