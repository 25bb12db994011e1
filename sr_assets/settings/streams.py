"""The keys of a stream: source, target, advisories, rules of operators, partitions, sampling and tracking."""

from functools import cached_property
from itertools import combinations
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.errors import ConfigurationError
from sr_assets.domain.provenance import Identity
from sr_assets.domain.senders import HeaderName, JsonField, SubjectToken
from sr_assets.domain.sizing import MAX_FOLD_MESSAGES
from sr_assets.domain.subjects import observer_subject, overlaps, target_subject
from sr_assets.domain.target_stream import TargetOptions, shown_setting
from sr_assets.domain.topology.wanted import OUR_NAMES
from sr_assets.domain.tracking.announcements import Flapping
from sr_assets.domain.tracking.maintenance import Window
from sr_assets.domain.tracking.outages import Guard
from sr_assets.domain.tracking.rules import Policy
from sr_assets.settings.cluster_urls import ChoriaBlock, TlsBlock, Url, with_api, with_security
from sr_assets.settings.entries import CommonKeys, FeedSettings
from sr_assets.settings.lake import LakeSettings
from sr_assets.settings.mapping import Block, file_key
from sr_assets.settings.names import (
    AdvisoryTemplate,
    ApiPrefix,
    Domain,
    FieldPath,
    Filter,
    Prefix,
    Remove,
    SenderField,
    SenderHeader,
    SenderToken,
    StreamName,
    read_filter,
    rewritten,
)
from sr_assets.settings.operator_rules import (
    ClassBlocks,
    FlappingBlock,
    MaintenanceBlock,
    NodeClasses,
    OutageGuardBlock,
    refuse_other_sites,
    refuse_unknown_classes,
)
from sr_assets.settings.values import (
    Duration,
    DurationLimit,
    Flag,
    NumberLimit,
    Positive,
    SizeLimit,
    Span,
    Text,
    choice,
    shown,
    size_in_bytes,
    whole_number,
)

End = Literal["source", "target"]
Format = Literal["v2", "v1"]
Storage = Literal["file", "memory"]
Retention = Literal["limits", "interest", "workqueue"]
Discard = Literal["old", "new"]
Compression = Literal["none", "s2"]
Persist = Literal["default", "async"]
#: JetStream's names of settings that differ from ours.
JETSTREAM_NAMES: Final = {ours: theirs for theirs, ours in OUR_NAMES.items()}
#: JetStream's maximum of replicas.
Replicas = Annotated[int, whole_number(1, 5)]
#: The lag of each lane is counted by two requests.
MAX_LANES: Final = 256
#: Replaced by the number of the partition in `filter`.
NUMBER: Final = "{p}"
Order = Literal["stream", "sender", "none"]
OnTargetReset = Literal["continue", "recopy", "stop"]
OnPoison = Literal["park", "stop"]
AllowBatched = Literal["auto", "off"]
_MOST_METADATA = 64 << 20
CatchUp = Annotated[int, whole_number(1, MAX_FOLD_MESSAGES)]


class AdvisorySettings(Block):
    """`advisory` of a stream: the announcement of transitions. `reliable` None means JetStream if a stream takes it."""

    subject: AdvisoryTemplate = file_key("`%s` is the event, `%v` the node")
    reliable: Flag | None = file_key("see [advisories](advisories.md#an-advisory)", None, default_text="automatic")
    cluster: Annotated[End, choice(End)] = file_key("where to publish", "source")
    observer_subject: AdvisoryTemplate = file_key(
        "the subject of the site's heartbeats", "", default_text="see [advisories](advisories.md#the-heartbeat)"
    )
    format: Annotated[Format, choice(Format)] = file_key(
        "`v1` is the old replicator's format, without `new`; its replicator is the entry's `name`", "v2"
    )


class PlacementBlock(Block):
    """`placement` of a stream: the cluster and tags of its servers."""

    cluster: Text | None = file_key("the name of the servers' cluster", None)
    tags: tuple[Text, ...] = file_key("tags that each server has", [])


class TargetBlock(Block):
    """`target` of a stream: settings of a new target that differ from its source's."""

    subjects: Annotated[tuple[Filter, ...], Field(min_length=1)] | None = file_key(
        "its subjects, which must include those of the copies", None
    )
    storage: Annotated[Storage, choice(Storage)] | None = file_key("the storage", None)
    retention: Annotated[Retention, choice(Retention)] | None = file_key(
        "the retention policy; without `limits`, consumers delete copies",
        None,
        default_text="limits",
    )
    replicas: Replicas | None = file_key("the number of replicas", None)
    max_age: DurationLimit | None = file_key("maximum age of a message", None)
    max_bytes: SizeLimit | None = file_key("maximum size", None)
    max_msgs: NumberLimit | None = file_key("maximum number of messages", None)
    max_msgs_per_subject: NumberLimit | None = file_key("maximum number of messages of a subject", None)
    max_msg_size: SizeLimit | None = file_key(
        "maximum size of a message with its headers", None, default_text="unlimited"
    )
    discard: Annotated[Discard, choice(Discard)] | None = file_key("the messages that a full stream discards", None)
    duplicate_window: Duration | None = file_key(
        "the duration of the detection of duplicates", None, default_text="the source's, at least 2 minutes"
    )
    compression: Annotated[Compression, choice(Compression)] | None = file_key(
        "the compression", None, default_text="none"
    )
    persist: Annotated[Persist, choice(Persist)] | None = file_key(
        "`async`: the server acknowledges a message before it writes it to disk (one replica, `file`, nats-server 2.12 or"
        " later); see [operations](troubleshooting.md#limits)",
        None,
        default_text="default",
    )
    allow_direct: Flag | None = file_key("whether replicas serve messages", None, default_text="true")
    deny_delete: Flag | None = file_key("whether the server refuses to delete messages", None, default_text="false")
    deny_purge: Flag | None = file_key("whether the server refuses to purge the stream", None, default_text="false")
    placement: PlacementBlock = file_key("[placement](#block-placement)", {}, default_text="none")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        window_ns, age_ns = self.duplicate_window, self.max_age
        if window_ns and age_ns and window_ns > age_ns:
            raise ValueError(
                f"duplicate_window {shown_setting('duplicate_window', window_ns)} is longer than max_age"
                f" {shown_setting('max_age', age_ns)}; use at most max_age"
            )
        if self.persist == "async" and (self.replicas not in (None, 1) or self.storage == "memory"):
            raise ValueError("persist async is for one replica on files; remove it, or replicas and storage")
        return self

    @property
    def options(self) -> TargetOptions | None:
        """The settings of the block, or None if it is empty."""
        settings = {name: getattr(self, name) for name in self.keys().values() if name != "placement"}
        placement = {"cluster": self.placement.cluster, "tags": list(self.placement.tags)}
        settings["placement"] = {key: value for key, value in placement.items() if value} or None
        configured = [(JETSTREAM_NAMES.get(key, key), value) for key, value in settings.items() if value is not None]
        return TargetOptions(tuple(configured)) if configured else None


class PartitionsBlock(Block):
    """`partitions` of a stream: a number of partitions and their filter, or a list of filters."""

    count: Annotated[int, whole_number(1, MAX_LANES)] | None = file_key(
        "the number of partitions", None, default_text="the number of `subjects`"
    )
    filter: Text | None = file_key("the subjects of partition `{p}`, such as `nodes.{p}.>`; `{p}` counts from 0", None)
    subjects: tuple[Filter, ...] | None = file_key("instead of `filter`: the subjects of each partition", None)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.filter is None) == (self.subjects is None):
            has = "has both filter and subjects" if self.filter is not None else "has neither filter nor subjects"
            raise ValueError(f"{has}; set count and filter, or subjects")
        if self.filter is not None:
            self._check_filter(self.filter)
        elif self.subjects is not None and not 1 <= len(self.subjects) <= MAX_LANES:
            raise ValueError(f"subjects: has {len(self.subjects)} subjects; use 1 to {MAX_LANES}")
        elif self.subjects is not None and (numbered := [each for each in self.subjects if NUMBER in each]):
            raise ValueError(
                f"subjects: {shown(numbered[0])} has {NUMBER}, which only filter replaces; use count and filter"
            )
        elif self.subjects is not None and self.count not in (None, len(self.subjects)):
            raise ValueError(
                f"count: {self.count} contradicts subjects, which has {len(self.subjects)} subjects; remove count"
            )
        for first, second in combinations(self.lanes, 2):
            if overlaps(first, second):
                key = "subjects" if self.filter is None else "filter"
                raise ValueError(
                    f"{key}: {shown(first)} and {shown(second)} overlap, so a message would be in both partitions; use"
                    " subjects that exclude each other"
                )
        return self

    def _check_filter(self, text: str) -> None:
        if self.count is None:
            raise ValueError(f"filter: {shown(text)} needs count, the number of partitions")
        if NUMBER not in text:
            raise ValueError(
                f"filter: {shown(text)} lacks {NUMBER}, the number of the partition; use for example nodes.{NUMBER}.>"
            )
        try:
            read_filter(text.replace(NUMBER, "0"))
        except ValueError as error:
            raise ValueError(f"filter: {error}") from None

    @property
    def lanes(self) -> tuple[str, ...]:
        """The filter of each partition, in order."""
        if self.subjects is not None:
            return self.subjects
        return tuple(str(self.filter).replace(NUMBER, str(number)) for number in range(self.count or 0))


class StreamSettings(CommonKeys):
    """One of `streams`. Only `within` the top level it has the inherited keys."""

    kind: ClassVar[Literal["stream"]] = "stream"
    inherited: ClassVar[tuple[str, ...]] = (
        *CommonKeys.inherited,
        "maintenance",
        "outage_guard",
        "flapping",
        "recover_after_ns",
        "purge_after_ns",
        "classes",
        "catch_up",
    )

    maintenance: tuple[MaintenanceBlock, ...] | None = file_key(
        "[windows](#block-maintenance) without announcements", None, default_text="the top level's"
    )
    outage_guard: OutageGuardBlock | None = file_key(
        "delay announcements during an [outage](#block-outage_guard) of the site", None, default_text="the top level's"
    )
    flapping: FlappingBlock | None = file_key(
        "announce `flapping` and `settled` of a [flapping](#block-flapping) node", None, default_text="the top level's"
    )
    recover_after_ns: Span | None = file_key(
        "announce `recover` once the node was up for this time",
        None,
        name="recover_after",
        default_text="the top level's",
    )
    partitions: PartitionsBlock | None = file_key(
        "[partitions](#block-partitions) that read and copy the stream in parallel", None, default_text="none"
    )
    workers: Positive = file_key("parallel writers", 1)

    source_url: Url = file_key("the source's cluster; see [URLs and TLS](#urls-and-tls)")
    target_url: Url = file_key("the target's cluster")
    source_domain: Domain | None = file_key(
        "the JetStream domain of a leafnode or hub, whose API is `$JS.<domain>.API`",
        None,
        default_text="the server's own",
    )
    target_domain: Domain | None = file_key("the same for the target", None, default_text="the server's own")
    source_api_prefix: ApiPrefix | None = file_key(
        "instead of a domain: the API prefix, such as `$JS.leaf.API`, of an imported account",
        None,
        default_text="`$JS.API`",
    )
    target_api_prefix: ApiPrefix | None = file_key("the same for the target", None, default_text="`$JS.API`")
    named_target: StreamName | None = file_key(
        "the target, created if missing", None, name="target_stream", default_text="`stream`"
    )
    prefix: Prefix = file_key("prepended to each subject, with a dot", "", name="target_subject_prefix")
    remove: Remove = file_key("removed from each subject, at every occurrence", "", name="target_subject_remove")
    creates_target: Flag | None = file_key(
        "whether a missing target is created", None, name="create_target", default_text="true"
    )
    no_target_create: Flag | None = file_key("the opposite of `create_target`", None, default_text="false")
    target_block: TargetBlock | None = file_key(
        "[differences](#block-target) of a new target", None, name="target", default_text="as the source"
    )
    ephemeral: Flag = file_key("each `up` or `run` copies the stream once from the start; not with `inspect_…`", False)
    max_age_ns: Duration | None = file_key(
        "older messages are not copied; they count as signs of life", None, name="max_age"
    )
    inspect_field: SenderField | None = file_key("the [sender](rules.md#who-sent-it) is in this JSON field", None)
    inspect_header: SenderHeader | None = file_key("the sender is in this header", None)
    inspect_subject_token: SenderToken = file_key(
        "the sender is this token of the subject: 1 is the first, -1 the whole subject, 0 none", None
    )
    inspect_duration_ns: Duration | None = file_key(
        "the sampling interval; longer silence retires a node", None, name="inspect_duration"
    )
    warn_duration_ns: Duration | None = file_key(
        "longer silence is a timeout", None, name="warn_duration", default_text="half of `inspect_duration`"
    )
    size_trigger: Annotated[int, size_in_bytes(0)] | None = file_key(
        "copy if the size differs from the last copy by this much", None
    )
    force_path: FieldPath | None = file_key(
        "a JSON field that forces a copy if it is `true`", None, name="inspect_force_field"
    )
    advisory: AdvisorySettings | None = file_key("[announce](#block-advisory) transitions", None)
    lake: LakeSettings | None = file_key("keep the stream in [partitioned files](#block-lake)", None)
    retired_retention_ns: Duration | None = file_key(
        "retention of retired nodes", None, name="retired_retention", default_text="forever"
    )
    purge_after_ns: Duration | None = file_key(
        "delete all rows of a node this long after it retired, its transitions included",
        None,
        name="purge_after",
        default_text="the top level's",
    )
    classes: ClassBlocks | None = file_key(
        "[classes](#block-classes) of nodes; the first one that matches a message counts",
        None,
        default_text="the top level's",
    )
    named_order: Annotated[Order, choice(Order)] | None = file_key(
        "the order of copies: the source's, each sender's, or none",
        None,
        name="order",
        default_text="`stream`; `sender` with several workers or partitions",
    )
    on_target_reset: Annotated[OnTargetReset, choice(OnTargetReset)] = file_key(
        "the reaction to a target that was deleted or recreated: `continue` with new messages, `recopy` the messages"
        " that the source still holds, or `stop`",
        "continue",
    )
    on_poison: Annotated[OnPoison, choice(OnPoison)] = file_key(
        "the reaction to a message that the target cannot store", "park"
    )
    max_nodes: Positive = file_key(
        "the most nodes, retired ones included; the messages of further senders are copied as if they had none",
        5_000_000,
    )
    max_metadata: Annotated[int, size_in_bytes(1, _MOST_METADATA)] = file_key(
        "the largest inventory of a registration; a larger one, or one 200 times as large as its message, is left out",
        "1 MiB",
    )
    allow_batched: Annotated[AllowBatched, choice(AllowBatched)] = file_key(
        "`auto`: create targets with `allow_batched`, and publish in"
        " fast-ingest batches into targets that have it (nats-server 2.14 or"
        " later); `off`: one acknowledgement for each message",
        "auto",
    )
    batch_messages: Positive = file_key(
        "the maximum number of messages in a batch; of a tracked stream at most 500,000", 50_000
    )
    catch_up: CatchUp | None = file_key(
        "limits the batches of a stream that is behind: a tracked one reads at most 250,000 messages or 512 MiB per core of the"
        " engine; a plain one copies as many as take 5 s, but at least `batch_messages`",
        None,
        name="catch_up_messages",
        default_text="500,000; `batch_messages` if set",
    )
    source_tls: TlsBlock | None = file_key("as `tls`, for one link", None, default_text="`tls`")
    target_tls: TlsBlock | None = file_key("as `tls`, for one link", None, default_text="`tls`")
    source_choria: ChoriaBlock | None = file_key("as `choria`, for one link", None, default_text="`choria`")
    target_choria: ChoriaBlock | None = file_key("as `choria`, for one link", None, default_text="`choria`")
    disable_source_tls: Flag = file_key("ignore every `tls` block for this link", False)
    disable_target_tls: Flag = file_key("ignore every `tls` block for this link", False)
    paused: Flag = file_key("pause copying, as the command `pause` does; also [dynamic](data.md#dynamic-values)", False)
    target_initiated: Flag = file_key("accepted with a warning: copying always tolerates latency", False)
    #: The top-level `name`.
    replicator: str = ""

    def within(self, top: Any) -> Self:
        """Return the stream with the inherited keys filled in; raises ValueError if they contradict its own."""
        entry = super().within(top).changed(replicator=top.replicator)
        refuse_other_sites(self.maintenance or (), [entry.name])
        refuse_unknown_classes(self.maintenance or (), entry.class_names)
        _ = entry.guard
        if entry.advisory is None:
            return entry
        template = entry.advisory.observer_subject or None
        observer = observer_subject(template, top.replicator, entry.name, entry.stream)
        return entry.changed(advisory=entry.advisory.changed(observer_subject=observer))

    @cached_property
    def source(self) -> ClusterSettings:
        """The cluster of the source; raises ValueError if keys about it contradict each other."""
        return with_security(
            with_api(self.source_url, self.source_domain, self.source_api_prefix, "source_"),
            [self.source_tls, self.tls],
            [self.source_choria, self.choria],
            plain="disable_source_tls" if self.disable_source_tls else None,
        )

    @cached_property
    def target(self) -> ClusterSettings:
        """The cluster of the target; raises ValueError if keys about it contradict each other."""
        return with_security(
            with_api(self.target_url, self.target_domain, self.target_api_prefix, "target_"),
            [self.target_tls, self.tls],
            [self.target_choria, self.choria],
            plain="disable_target_tls" if self.disable_target_tls else None,
        )

    @property
    def clusters(self) -> tuple[ClusterSettings, ...]:
        """The clusters of source and target."""
        return self.source, self.target

    @cached_property
    def identity(self) -> Identity:
        """What its copies say about their origin."""
        return Identity(self.stream, self.replicator, self.name)

    @property
    def target_stream(self) -> str:
        return self.named_target or self.stream

    @property
    def create_target(self) -> bool:
        """Whether a missing target is created."""
        return not self.no_target_create if self.creates_target is None else self.creates_target

    @cached_property
    def target_options(self) -> TargetOptions | None:
        """The differences of a new target from its source, or None."""
        return self.target_block.options if self.target_block else None

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """The filter of each partition, or nothing without `partitions`."""
        return self.partitions.lanes if self.partitions else ()

    @property
    def writers(self) -> int:
        """The number of parallel writers: `workers`, or one for each partition."""
        return len(self.lanes) or self.workers

    @property
    def order(self) -> Order:
        """The order of the copies: by default the stream's, or each sender's with several writers."""
        return self.named_order or ("stream" if self.writers == 1 else "sender")

    @property
    def catch_up_messages(self) -> int:
        """The largest batch while it is behind; `batch_messages`, set alone, bounds every batch."""
        named = self.catch_up
        if named is None:
            named = self.batch_messages if "batch_messages" in self.model_fields_set else MAX_FOLD_MESSAGES
        return max(self.batch_messages, named)

    @property
    def extractor(self) -> JsonField | HeaderName | SubjectToken | None:
        """The sender extractor, or None without sampling."""
        return self.inspect_field or self.inspect_header or self.inspect_subject_token

    @cached_property
    def policy(self) -> Policy | None:
        """The sampling and tracking of senders, or None."""
        interval_ns = self.inspect_duration_ns
        if interval_ns is None:
            return None
        warning_ns = interval_ns // 2 if self.warn_duration_ns is None else self.warn_duration_ns
        return Policy(interval_ns, warning_ns, self.size_trigger or 0)

    @cached_property
    def node_classes(self) -> NodeClasses | None:
        """The classes of its nodes, or None; raises ValueError if a class's durations contradict the stream's."""
        return NodeClasses.of(self.classes or (), self.policy)

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(block.name for block in self.node_classes.blocks) if self.node_classes else ()

    @property
    def muted_classes(self) -> tuple[str, ...]:
        """The classes that are never announced."""
        return tuple(name for name in self.class_names if not self.announces(name))

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        """The maintenance windows about this stream."""
        return tuple(block.window for block in self.maintenance or () if block.about(self.name))

    @cached_property
    def guard(self) -> Guard | None:
        """The outage guard, or None; raises ValueError if its durations contradict the stream's."""
        if self.outage_guard is None or self.policy is None:
            return None
        warnings = {name: self.policy_of(name).warning_ns for name in self.class_names}
        return self.outage_guard.guard(self.policy.warning_ns, warnings)

    @property
    def flapping_rule(self) -> Flapping | None:
        """The rule about flapping nodes, or None."""
        return self.flapping.rule if self.flapping else None

    def policy_of(self, node_class: str | None) -> Policy:
        """Return the policy of a class of a tracked stream; None is the class of other nodes."""
        assert self.policy is not None
        return self.policy if self.node_classes is None else self.node_classes.policy(node_class)

    def announces(self, node_class: str | None) -> bool:
        """Return whether the transitions of a class may be announced."""
        return self.node_classes is None or self.node_classes.announces(node_class)

    @property
    def shortest_warning_ns(self) -> int | None:
        """The shortest `warn_duration` of its nodes, or None without tracking."""
        if self.policy is None or self.node_classes is None:
            return self.policy.warning_ns if self.policy else None
        return self.node_classes.shortest_warning_ns

    @property
    def tracked(self) -> bool:
        """Whether senders are sampled and tracked."""
        return self.policy is not None

    @property
    def advisory_cluster(self) -> ClusterSettings | None:
        """The cluster for announcements, or None."""
        if self.advisory is None:
            return None
        return self.source if self.advisory.cluster == "source" else self.target

    @property
    def copies_all_unchanged(self) -> bool:
        """Whether its target gets every message of its source with an unchanged subject."""
        chosen = self.tracked or self.filter_subject not in (None, ">") or self.max_age_ns is not None
        return not (chosen or self.prefix or self.remove or self.ephemeral)

    @property
    def copies_pattern(self) -> str | None:
        """The pattern of all subjects of our copies, or None if it is every subject or unknown."""
        pattern = target_subject(self.filter_subject or ">", self.prefix)
        return None if self.remove or pattern == ">" else pattern

    def target_pattern(self, pattern: str) -> str:
        """Rewrite a subject of the source, with or without wildcards, as its messages are rewritten.

        Raises ConfigurationError if the result is invalid. Without a filter the source's own subjects decide, so a run
        calls this for each of them before it copies a message.
        """
        try:
            return rewritten(pattern, self.prefix, self.remove)
        except ValueError as error:
            raise ConfigurationError(f"stream {self.stream!r} (name {self.name!r}): {error}") from None


Entry = StreamSettings | FeedSettings
