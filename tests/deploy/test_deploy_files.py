"""Files to deploy with agree with the package: Kubernetes' manifests, Ray's service, Slurm's script, the container's file."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from jinfercept.cli.command import parse_command_line
from jinfercept.cli.main import COMMANDS, PROG
from jinfercept.cli.serve import Serve
from jinfercept.config import EngineConfig
from jinfercept.fleet.app_config import FleetConfig
from jinfercept.serve.options import ServerOptions
from tests.support.live_server import until

WRITABLE = {"/var/cache/jinfercept", "/var/lib/jinfercept", "/tmp"}
"""Where a container writes: the volumes of `deploy/Containerfile`, and temporary files."""
_SECRET = ("KEY", "TOKEN", "PASSWORD", "SECRET")


def check_serve(words: Sequence[str]) -> tuple[ServerOptions, EngineConfig]:
    """Options of a `jinfercept serve` command. Raises for flags that do not exist and values that are wrong.

    Args:
        words: of the command, `serve` first.
    """
    command = parse_command_line(PROG, COMMANDS, words)
    assert isinstance(command, Serve)
    return command.options(), EngineConfig.from_options(command.engine)


def check_restricted(pod: Any) -> Any:
    """The container of a pod's specification. Raises if it may do more than it needs, or has a secret's text."""
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")} == WRITABLE
    for variable in container["env"]:
        if any(word in variable["name"] for word in _SECRET):
            assert "secretKeyRef" in variable["valueFrom"], variable["name"]
    return container


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


ROOT = Path(__file__).parents[2]
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
    assert (config.replicas.min, config.replicas.max) == (WORKERS["minReplicas"], WORKERS["maxReplicas"])
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


SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "serve.sbatch"
SRUN = """#!/bin/bash
trap 'echo terminated >> "$OUT/signals"; exit 0' TERM
printf '%s\\n' "$@" > "$OUT/words"
env | grep ^JINFERCEPT_ > "$OUT/environment"
touch "$OUT/begun"
while [[ -n $WAIT ]]; do sleep 0.02; done
exit 7
"""
KEY = "a long random text"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A folder of programs, a key, and the variables of a job on two nodes."""
    programs = {"srun": SRUN, "scontrol": "#!/bin/bash\necho node7\necho node8\n"}
    for name, code in programs.items():
        (tmp_path / name).write_text(code)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "key").write_text(f"{KEY}\n")
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "OUT": str(tmp_path),
        "WAIT": "",
        "JINFERCEPT_API_KEY_FILE": str(tmp_path / "key"),
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[7-8]",
    }


def begin(environment: Mapping[str, str], *words: str) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    return subprocess.Popen(["bash", SCRIPT, *words], env=environment, stdout=pipe, stderr=pipe, text=True)


def test_shellcheck_finds_nothing() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_step_is_a_command_that_exists_and_shows_no_secret(environment: dict[str, str], tmp_path: Path) -> None:
    job = begin(environment, "/models/llama-70b", "--kv-tokens", "65536")
    output, errors = job.communicate(timeout=60)
    assert (job.returncode, output, errors) == (7, "http://node7:22345\n", "")
    option, *step = (tmp_path / "words").read_text().splitlines()
    assert option == "--kill-on-bad-exit=1"
    (tmp_path / "jinfercept").write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "jinfercept").chmod(0o755)
    words = subprocess.check_output(step, env=environment | {"SLURM_PROCID": "1"}, text=True).splitlines()
    options, config = check_serve(words)
    assert (options.port, config.cache.kv_tokens) == (22345, 65536)
    hosts = config.hosts
    assert (hosts.coordinator, hosts.num_hosts, hosts.host_id) == (f"node7:{61440 + 2 * (12345 % 2048)}", 2, 1)
    variables = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines())
    assert variables["JINFERCEPT_API_KEY"] == KEY
    assert len(variables["JINFERCEPT_HOSTS_TOKEN"]) == 64
    assert not {KEY, variables["JINFERCEPT_HOSTS_TOKEN"]} & set(words)


def test_one_node_needs_no_coordinator_and_a_key_is_needed(environment: dict[str, str], tmp_path: Path) -> None:
    job = begin(environment | {"SLURM_JOB_NUM_NODES": "1"})
    job.communicate(timeout=60)
    _, _, *words = (tmp_path / "words").read_text().splitlines()
    assert check_serve(words)[1].hosts.coordinator is None
    (tmp_path / "words").unlink()
    (tmp_path / "key").write_text("")
    job = begin(environment)
    assert "no API key" in job.communicate(timeout=60)[1]
    assert (job.returncode, (tmp_path / "words").exists()) == (2, False)


def test_the_signal_before_the_time_limit_reaches_the_server(environment: dict[str, str], tmp_path: Path) -> None:
    job = begin(environment | {"WAIT": "yes"})
    until((tmp_path / "begun").exists)
    job.terminate()
    job.communicate(timeout=60)
    assert (job.returncode, (tmp_path / "signals").read_text()) == (0, "terminated\n")


FILE = ROOT / "deploy" / "Containerfile"
TEXT = re.sub(r"\\\n", " ", FILE.read_text(encoding="utf-8"))
LINES = [line for line in TEXT.splitlines() if line and not line.startswith("#")]


def arguments(instruction: str) -> list[str]:
    """What follows an instruction, for each time that the file has it."""
    return [line.partition(" ")[2].strip() for line in LINES if line.startswith(f"{instruction} ")]


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, FILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_last_stage_runs_a_command_that_exists_as_another_user_than_root() -> None:
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", arguments("USER")[-1])
    [entry], [command] = arguments("ENTRYPOINT"), arguments("CMD")[-1:]
    assert json.loads(entry) == [PROG]
    options, _ = check_serve(json.loads(command))
    assert (options.host, f"{options.port}") == ("0.0.0.0", arguments("EXPOSE")[0])
    [check] = arguments("HEALTHCHECK")
    assert f"http://127.0.0.1:{options.port}/health" in check
    assert {*json.loads(arguments("VOLUME")[0]), "/tmp"} == WRITABLE
    assert "JINFERCEPT_CACHE=/var/cache/jinfercept" in TEXT
    with pytest.raises(SystemExit):
        parse_command_line(PROG, COMMANDS, ["serve", "smollm2-135m", "--no-such-flag"])
