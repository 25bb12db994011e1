"""The configuration: one YAML file and the environment → frozen, validated Settings; nothing else reads either.

The file is the Stream Replicator's own, with some more keys. Each module uses those before it:
`values`, `names`, `clusters` (what one key may hold) → `mapping`, `links`, `heartbeats`, `target`, `daily` (blocks of the file) →
`digest`, `monitoring`, `spark`, `records` (what everything else works with) → `shape`, `notify` (the mappings of the file) →
`contradictions` (keys that exclude each other) → `file` (the whole of it) →
`document` (YAML and environment → a tree) → `loading` (all of it in order).
The block `topology` has the same steps in modules of its own; `legacy` reads the old replicator's file.
Not here: anything that needs a connection. What only a server knows (does the source exist, what are its subjects) is
asked by `check --connect` and by a run.
"""

from sr_assets.domain.clusters import ChoriaSettings, ClusterSettings, TlsSettings
from sr_assets.settings.clusters import parse_cluster
from sr_assets.settings.daily import DailySettings
from sr_assets.settings.loading import DEFAULT_CONFIG, load_cluster, load_settings
from sr_assets.settings.monitoring import EmailSettings, MetricsSettings, NotifySettings
from sr_assets.settings.names import asset_name
from sr_assets.settings.records import (
    AdvisorySettings,
    Entry,
    FeedSettings,
    Kind,
    OnPoison,
    OnSourceReset,
    OnTargetReset,
    Order,
    SensorSettings,
    Settings,
    Start,
    StreamSettings,
)
from sr_assets.settings.spark import SparkSettings
from sr_assets.settings.topology_records import TopologyCluster, TopologySettings
from sr_assets.settings.values import parse_duration

__all__ = [
    "DEFAULT_CONFIG",
    "AdvisorySettings",
    "ChoriaSettings",
    "ClusterSettings",
    "DailySettings",
    "EmailSettings",
    "Entry",
    "FeedSettings",
    "Kind",
    "MetricsSettings",
    "NotifySettings",
    "OnPoison",
    "OnSourceReset",
    "OnTargetReset",
    "Order",
    "SensorSettings",
    "Settings",
    "SparkSettings",
    "Start",
    "StreamSettings",
    "TlsSettings",
    "TopologyCluster",
    "TopologySettings",
    "asset_name",
    "load_cluster",
    "load_settings",
    "parse_cluster",
    "parse_duration",
]
