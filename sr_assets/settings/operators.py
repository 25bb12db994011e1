"""The rules of operators of a stream: what is announced, and when. The top level has the same keys as defaults."""

from typing import Self

from sr_assets.domain.tracking.announcements import Flapping
from sr_assets.domain.tracking.maintenance import Window
from sr_assets.domain.tracking.outages import Guard
from sr_assets.domain.tracking.rules import Policy
from sr_assets.settings.classes import NodeClasses
from sr_assets.settings.entries import CommonKeys, TopLevel
from sr_assets.settings.flapping import FlappingBlock
from sr_assets.settings.maintenance import MaintenanceBlock, refuse_other_sites, refuse_unknown_classes
from sr_assets.settings.mapping import file_key
from sr_assets.settings.outage_guard import OutageGuardBlock
from sr_assets.settings.values import Span


class OperatorKeys(CommonKeys):
    """The keys of a stream."""

    named_maintenance: tuple[MaintenanceBlock, ...] | None = file_key(
        "[windows](#block-maintenance) without announcements", None, name="maintenance", default_text="the top level's"
    )
    named_guard: OutageGuardBlock | None = file_key(
        "hold announcements during an [outage](#block-outage_guard) of the site",
        None,
        name="outage_guard",
        default_text="the top level's",
    )
    named_flapping: FlappingBlock | None = file_key(
        "announce `flapping` and `settled` of a [flapping](#block-flapping) node",
        None,
        name="flapping",
        default_text="the top level's",
    )
    named_recover_after_ns: Span | None = file_key(
        "announce `recover` once the node was up for this time",
        None,
        name="recover_after",
        default_text="the top level's",
    )
    #: The windows about this stream, and its other rules.
    windows: tuple[Window, ...] = ()
    guard: Guard | None = None
    flapping_rule: Flapping | None = None
    recover_after_ns: int = 0
    #: Its classes, and those of them that are never announced.
    class_names: tuple[str, ...] = ()
    muted_classes: tuple[str, ...] = ()

    def with_rules(self, top: TopLevel, policy: Policy | None, classes: NodeClasses | None) -> Self:
        """Return the stream with its rules filled in; raises ValueError if they contradict each other."""
        blocks = top.maintenance if self.named_maintenance is None else self.named_maintenance
        class_names = tuple(block.name for block in classes.blocks) if classes else ()
        refuse_other_sites(self.named_maintenance or (), [self.name])
        refuse_unknown_classes(self.named_maintenance or (), class_names)
        guard, flapping = self.named_guard or top.outage_guard, self.named_flapping or top.flapping
        recover_after_ns = self.named_recover_after_ns
        warnings = {block.name: classes.policy(block.name).warning_ns for block in classes.blocks} if classes else {}
        return self.changed(
            windows=tuple(block.window for block in blocks if block.about(self.name)),
            guard=guard.guard(policy.warning_ns, warnings) if guard and policy else None,
            flapping_rule=flapping.rule if flapping else None,
            class_names=class_names,
            muted_classes=tuple(name for name in class_names if classes and not classes.announces(name)),
            recover_after_ns=top.recover_after_ns if recover_after_ns is None else recover_after_ns,
        )
