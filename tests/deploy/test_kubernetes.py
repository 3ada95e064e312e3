"""The Kubernetes manifests: valid by the API's schemas, safe by default, and with flags and paths that exist."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.support.deployed import check_restricted, check_serve

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
VERSION = "1.35"
SERVER: list[Any] = list(yaml.safe_load_all((KUBERNETES / "server.yaml").read_text(encoding="utf-8")))


def of_kind(kind: str) -> Any:
    [resource] = [manifest for manifest in SERVER if manifest["kind"] == kind]
    return resource


def pod() -> Any:
    return of_kind("Deployment")["spec"]["template"]["spec"]


@pytest.mark.parametrize("kind", ["Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"])
def test_a_manifest_fits_its_schema_strictly(kind: str) -> None:
    kubernetes_validate.validate(of_kind(kind), VERSION, strict=True)


def test_all_parts_select_the_pods_of_the_deployment() -> None:
    labels = of_kind("Deployment")["spec"]["template"]["metadata"]["labels"]
    selectors = [
        of_kind("Deployment")["spec"]["selector"]["matchLabels"],
        of_kind("Service")["spec"]["selector"],
        of_kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        of_kind("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ]
    assert all(selector == labels for selector in selectors)


def test_the_command_exists_and_ends_before_kubernetes_kills_it() -> None:
    [container] = pod()["containers"]
    options, _ = check_serve(container["args"])
    [port] = container["ports"]
    assert options.port == port["containerPort"] == of_kind("Service")["spec"]["ports"][0]["port"]
    before_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod()["terminationGracePeriodSeconds"] >= before_s + options.drain_timeout + 20


def test_probes_ask_for_routes_that_need_no_key() -> None:
    [container] = pod()["containers"]
    paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}  # see docs/serving.md


def test_containers_are_restricted_and_so_is_their_network() -> None:
    check_restricted(pod())
    assert pod()["automountServiceAccountToken"] is False
    policy = of_kind("NetworkPolicy")["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert all(rule.get("from") and rule.get("ports") for rule in policy["ingress"])
    assert all(rule.get("to") and rule.get("ports") for rule in policy["egress"])
