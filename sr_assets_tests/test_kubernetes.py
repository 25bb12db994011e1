"""`packaging/kubernetes`: the manifests match the schemas of Kubernetes and the Prometheus operator, and our configuration."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from sr_assets.operate.health import HEALTH_PATHS
from sr_assets.settings import load_settings
from sr_assets.settings.needed_permissions import used_clusters

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "packaging" / "kubernetes"
VERSION = "1.37"


def manifests() -> dict[str, dict[str, Any]]:
    """Return the manifests by kind, in the order of the kustomization."""
    files = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    assert {*files, "kustomization.yaml"} == {path.name for path in FOLDER.iterdir()}
    return {
        manifest["kind"]: manifest for file in files for manifest in yaml.safe_load_all((FOLDER / file).read_text())
    }


MANIFESTS = manifests()
_OPERATOR = ("ServiceMonitor", "PrometheusRule")


@pytest.mark.parametrize("kind", [kind for kind in MANIFESTS if kind not in _OPERATOR])
def test_manifest_matches_the_schema_of_kubernetes(kind: str) -> None:
    kubernetes_validate.validate(MANIFESTS[kind], VERSION, strict=True)


@pytest.mark.parametrize("kind", _OPERATOR)
def test_manifest_matches_the_schema_of_the_operator(kind: str) -> None:
    # Its import makes thousands of models.
    from cloudcoil.models.prometheus_operator import v1 as prometheus_operator

    model = getattr(prometheus_operator, kind).model_validate(MANIFESTS[kind])
    # The model drops keys that the schema does not have.
    assert model.model_dump(mode="json", by_alias=True, exclude_unset=True) == MANIFESTS[kind]


def test_prometheus_rule_equals_the_alert_rules() -> None:
    assert MANIFESTS["PrometheusRule"]["spec"] == yaml.safe_load((ROOT / "conf/prometheus/alerts.yaml").read_text())


def test_manifests_select_the_pods_and_their_port() -> None:
    pod = MANIFESTS["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    (port,) = _container()["ports"]
    assert MANIFESTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert MANIFESTS["Service"]["spec"]["selector"] == labels
    assert MANIFESTS["ServiceMonitor"]["spec"]["selector"]["matchLabels"] == MANIFESTS["Service"]["metadata"]["labels"]
    (endpoint,) = MANIFESTS["ServiceMonitor"]["spec"]["endpoints"]
    (service_port,) = MANIFESTS["Service"]["spec"]["ports"]
    assert endpoint["port"] == service_port["name"]
    assert service_port["targetPort"] == port["name"]
    assert service_port["port"] == port["containerPort"]


def test_configuration_elects_among_the_pods_without_a_volume(tmp_path: Path) -> None:
    file = tmp_path / "replication.yaml"
    file.write_text(MANIFESTS["ConfigMap"]["data"]["replication.yaml"])
    named = {variable["name"]: f"pod-{n}" for n, variable in enumerate(_container()["env"])}
    settings = load_settings(
        file, {**named, "SOURCE_PASSWORD": "a", "TARGET_PASSWORD": "b", "CHECKPOINT_KEY": "c" * 32}
    )
    assert not settings.warnings
    assert settings.unsigned_checkpoints(settings.entries[0].name) is None
    assert not any(cluster.sends_login_in_clear for cluster in used_clusters(settings))
    (entry,) = settings.entries
    assert entry.leader_election_name == "pod-0"
    assert settings.checkpoint_store(entry.name) is not None
    assert MANIFESTS["Deployment"]["spec"]["replicas"] == 2
    assert settings.metrics.port == _container()["ports"][0]["containerPort"]
    assert settings.metrics.host == "0.0.0.0"


def test_only_metrics_are_reachable_and_no_secret_is_shipped() -> None:
    policy = MANIFESTS["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == MANIFESTS["Deployment"]["spec"]["selector"]["matchLabels"]
    assert [port["port"] for rule in policy["ingress"] for port in rule["ports"]] == [_container()["ports"][0]["name"]]
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {53, 4222}
    assert "Secret" not in MANIFESTS


def test_probes_use_the_paths_of_health() -> None:
    container = _container()
    used = {container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "liveness", "readiness")}
    assert used == set(HEALTH_PATHS)
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def _container() -> dict[str, Any]:
    (container,) = MANIFESTS["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(container)
