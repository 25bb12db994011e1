"""The configuration: one YAML file and the environment become frozen, validated Settings.

The file format is the Stream Replicator's, with additional keys. Anything that needs a connection is left to `check
--connect` and to runs.
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
