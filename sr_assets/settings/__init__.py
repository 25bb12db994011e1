"""The configuration: one YAML file and the environment become frozen, validated Settings.

The file format is the Stream Replicator's, with additional keys. Anything that needs a connection is left to `check
--connect` and to runs.
"""

from sr_assets.domain.clusters import ChoriaSettings, ClusterSettings, TlsSettings
from sr_assets.settings.blocks import (
    DagsterSettings,
    DailySettings,
    HealthSettings,
    MetricsSettings,
    SensorSettings,
    SparkSettings,
)
from sr_assets.settings.cluster_urls import parse_cluster
from sr_assets.settings.data import SourceSettings
from sr_assets.settings.entries import FeedSettings, Kind, OnSourceReset, Start
from sr_assets.settings.heartbeats import HeartbeatSettings, HeartbeatSubject
from sr_assets.settings.loading import DEFAULT_CONFIG, load_cluster, load_settings, load_sources, reload_dynamic
from sr_assets.settings.names import asset_name
from sr_assets.settings.notify import EmailSettings, NotifySettings
from sr_assets.settings.streams import AdvisorySettings, Entry, OnPoison, OnTargetReset, Order, StreamSettings
from sr_assets.settings.top_level import Settings
from sr_assets.settings.topology import TopologyCluster, TopologySettings
from sr_assets.settings.values import parse_duration

__all__ = [
    "DEFAULT_CONFIG",
    "AdvisorySettings",
    "ChoriaSettings",
    "ClusterSettings",
    "DagsterSettings",
    "DailySettings",
    "EmailSettings",
    "Entry",
    "FeedSettings",
    "HealthSettings",
    "HeartbeatSettings",
    "HeartbeatSubject",
    "Kind",
    "MetricsSettings",
    "NotifySettings",
    "OnPoison",
    "OnSourceReset",
    "OnTargetReset",
    "Order",
    "SensorSettings",
    "Settings",
    "SourceSettings",
    "SparkSettings",
    "Start",
    "StreamSettings",
    "TlsSettings",
    "TopologyCluster",
    "TopologySettings",
    "asset_name",
    "load_cluster",
    "load_settings",
    "load_sources",
    "parse_cluster",
    "parse_duration",
    "reload_dynamic",
]
