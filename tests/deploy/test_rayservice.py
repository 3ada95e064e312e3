"""The RayService of KubeRay: its pods, and its application, which is that of `jinfercept deploy`."""

import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from jinfercept.fleet.app_config import FleetConfig
from tests.support.deployed import check_restricted

ROOT = Path(__file__).parents[2]
VERSION = "1.35"
SERVICE, BUDGET, POLICY = yaml.safe_load_all((ROOT / "deploy/kubernetes/rayservice.yaml").read_text(encoding="utf-8"))
CLUSTER: Any = SERVICE["spec"]["rayClusterConfig"]
HEAD: Any = CLUSTER["headGroupSpec"]["template"]
[WORKERS] = CLUSTER["workerGroupSpecs"]
SERVE: Any = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])


def test_the_application_is_one_that_can_be_deployed(tmp_path: Path) -> None:
    ServeDeploySchema.model_validate(SERVE)
    [application] = SERVE["applications"]
    module, _, name = application["import_path"].partition(":")
    assert callable(getattr(import_module(module), name))
    keys = tmp_path / "keys.toml"
    keys.write_text('[team]\nkey = "a long random text"\n')
    server = application["args"]["server"] | {"api_key_file": str(keys)}
    config = FleetConfig.parse(application["args"] | {"server": server})
    assert (config.name, config.server.port) == (application["name"], SERVE["http_options"]["port"])
    assert (config.replicas.least, config.replicas.most) == (WORKERS["minReplicas"], WORKERS["maxReplicas"])
    assert WORKERS["template"]["spec"]["terminationGracePeriodSeconds"] >= config.server.drain_timeout + 30


@pytest.mark.parametrize("template", [HEAD, WORKERS["template"]], ids=["head", "worker"])
def test_pods_fit_their_schema_and_are_restricted(template: Any) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": template["metadata"] | {"name": "x"},
        "spec": template["spec"],
    }
    kubernetes_validate.validate(pod, VERSION, strict=True)
    container = check_restricted(template["spec"])
    keys = SERVE["applications"][0]["args"]["server"]["api_key_file"]
    assert str(Path(keys).parent) in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"name": "serve", "containerPort": SERVE["http_options"]["port"]} in container["ports"]
    assert template["metadata"]["labels"] == BUDGET["spec"]["selector"]["matchLabels"]
    assert template["metadata"]["labels"] == POLICY["spec"]["podSelector"]["matchLabels"]


def test_ray_has_the_version_of_the_package_and_wants_a_token() -> None:
    kubernetes_validate.validate(BUDGET, VERSION, strict=True)
    kubernetes_validate.validate(POLICY, VERSION, strict=True)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    [lowest] = re.findall(r"ray\[serve\]>=([\d.]+)", " ".join(extras["fleet"]))
    assert CLUSTER["rayVersion"].startswith(f"{lowest}.")
    assert CLUSTER["authOptions"]["mode"] == "token"
    assert CLUSTER["authOptions"]["secretName"]
