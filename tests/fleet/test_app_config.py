"""What Ray gives to a fleet: the file of `jinfercept deploy`, and headers through Ray's proxy."""

import math
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jinfercept.cli.command import parse_command_line
from jinfercept.cli.main import COMMANDS, PROG, main
from jinfercept.errors import ConfigError
from jinfercept.fleet.app_config import FleetConfig, ReplicaRange
from jinfercept.fleet.proxy_headers import CALLBACK, proxy_middleware, readable_headers
from jinfercept.fleet.ray_start import LOCAL_VARIABLES
from jinfercept.fleet.replica_load import replicas_by_memory
from tests.support.docs_blocks import blocks_of
from tests.support.docs_reader import commands_in

NAMES = [b"x-session-id", b"x-request-id", b"serve_multiplexed_model_id", b"x-request-timeout-seconds", b"host"]
HEADERS = st.lists(st.tuples(st.sampled_from(NAMES), st.binary(max_size=8)), max_size=8)


@given(headers=HEADERS)
def test_all_headers_that_are_left_are_utf8_and_none_steers_ray(headers: list[tuple[bytes, bytes]]) -> None:
    kept = readable_headers(headers)
    for _, value in kept:
        assert value.decode().encode() == value
    names = [name for name, _ in kept]
    assert names.count(b"x-request-id") <= 1
    assert not {b"serve_multiplexed_model_id", b"x-request-timeout-seconds"} & set(names)
    for name in (b"x-session-id", b"host"):
        assert names.count(name) == [given for given, _ in headers].count(name)


def test_what_ray_can_read_is_unchanged_and_the_last_request_id_counts() -> None:
    given = [(b"host", b"a"), (b"x-session-id", "é".encode()), (b"x-request-id", b"one"), (b"x-request-id", b"two")]
    assert readable_headers(given) == [*given[:2], given[3]]
    assert readable_headers([(b"x-request-id", b"\xff")]) == []
    assert readable_headers([(b"x-session-id", b"\xff")]) == [(b"x-session-id", "ÿ".encode())]


def test_ray_of_the_command_calls_the_middleware() -> None:
    module, _, name = CALLBACK.partition(":")
    assert (module, name) == (proxy_middleware.__module__, proxy_middleware.__name__)
    assert LOCAL_VARIABLES["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] == CALLBACK


FILE = """
name: assistants
model: smollm2-135m
version: 2
replicas: {min: 2, max: 8}
cpus_per_replica: 4
engine: {kv_tokens: 65536, tensor_parallel_size: 2}
server: {host: 0.0.0.0, port: 8001, served_model_name: [a, b]}
"""


def test_a_file_is_read_and_its_fingerprint_changes_with_what_a_replica_serves(tmp_path: Path) -> None:
    path = tmp_path / "app.yaml"
    path.write_text(FILE)
    config = FleetConfig.read(path)
    assert (config.name, config.version, config.replicas) == ("assistants", "2", ReplicaRange(2, 8))
    assert (config.engine.get("kv_tokens"), config.server.served_model_name) == (65536, ("a", "b"))
    path.write_text(FILE.replace("version: 2", "version: 3"))
    other = FleetConfig.read(path)
    assert (other.fingerprint != config.fingerprint, other.secret == config.secret) == (True, True)
    path.write_text("# the same in other words" + FILE)
    assert FleetConfig.read(path).fingerprint == config.fingerprint


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "the fleet's file"),
        ({}, "model must name a model"),
        ({"model": 3}, "model must name a model"),
        ({"model": "m", "replica": 3}, "did you mean 'replicas'"),
        ({"model": "m", "replicas": 0}, "replicas must be a number, or"),
        ({"model": "m", "replicas": {"min": 3, "max": 2}}, "replicas must be a number, or"),
        ({"model": "m", "replicas": True}, "replicas must be a number, or"),
        ({"model": "m", "engine": {"kv_token": 3}}, "did you mean 'kv_tokens'"),
        ({"model": "m", "server": {"prot": 3}}, "did you mean 'port'"),
        ({"model": "m", "server": {"port": "x"}}, "wrong type"),
        ({"model": "m", "server": {"port": 70000}}, "65535"),
        ({"model": "m", "server": {"port": True}}, "port has the wrong type"),
        ({"model": "m", "server": {"drain_timeout": math.inf}}, "drain_timeout is not finite"),
        ({"model": "m", "server": {"state_url": " "}}, "state_url names no database"),
        ({"model": "m", "server": {"api_key": "secret"}}, "api_key has the wrong type; got a text; fix: a list"),
        ({"model": "m", "server": {"api_key": [3]}}, "api_key has the wrong type"),
        ({"model": "m", "server": {"log_format": "xml"}}, "log_format is one of"),
        ({"model": "m", "server": {"uds": "/tmp/socket"}}, "a deployed fleet cannot use a Unix socket"),
        ({"model": "m", "server": {"mcp": True}}, "a fleet is no MCP server"),
        ({"model": "m", "name": "a/b"}, "letters, digits"),
        ({"model": "m", "cpus_per_replica": "many"}, "number of CPUs"),
    ],
)
def test_a_wrong_file_is_said_by_name(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FleetConfig.parse(data)


def test_the_command_checks_a_file_without_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "app.yaml"
    path.write_text(FILE)
    assert main(["deploy", str(path), "--check"]) == 0
    assert capsys.readouterr().out == "assistants: smollm2-135m, 2 to 8 replicas\n"
    for server, message in (("tools: [/nothing/here.py]", "/nothing/here.py"), ("state_url: mysql://a/b", "mysql")):
        path.write_text(f"model: smollm2-135m\nserver: {{{server}}}")
        assert main(["deploy", str(path), "--check"]) == 2
        assert message in capsys.readouterr().err
    path.write_text("model: [")
    assert main(["deploy", str(path), "--check"]) == 2
    assert "not YAML" in capsys.readouterr().err


def test_replicas_follow_the_memory_that_is_demanded() -> None:
    def wanted(**demands: float) -> int:
        metrics = {"memory_demand": demands}
        context = SimpleNamespace(current_num_replicas=2, target_num_replicas=2, aggregated_metrics=metrics)
        return replicas_by_memory(context)[0]

    assert wanted(a=0.8, b=0.8) == 2
    assert wanted(a=2.4, b=1.7) == 6
    assert wanted(a=0.1, b=0.0) == 1
    assert wanted(a=9.0) == 2  # the other one has not reported


def test_the_file_and_the_commands_of_the_documentation_are_right() -> None:
    blocks = blocks_of("fleet.md")
    [file] = [block.code for block in blocks if block.language == "yaml"]
    assert FleetConfig.parse(yaml.safe_load(file)).replicas == ReplicaRange(2, 8)
    commands = [line for block in blocks if block.language == "bash" for line in commands_in(block.code)]
    ours = [shlex.split(line, comments=True)[1:] for line in commands if line.startswith("jinfercept")]
    assert len(ours) >= 4
    for words in ours:
        parse_command_line(PROG, COMMANDS, words)


def test_a_file_that_aliases_enlarge_is_an_error_at_once(tmp_path: Path) -> None:
    path = tmp_path / "app.yaml"
    lines = ["- &a0 [x]", *(f"- &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))]
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="table of names"):
        FleetConfig.read(path)


def test_a_deep_file_is_an_error_and_an_empty_version_is_none(tmp_path: Path) -> None:
    path = tmp_path / "app.yaml"
    path.write_text("model: " + "[" * 5000)
    with pytest.raises(ConfigError, match="not YAML"):
        FleetConfig.read(path)
    assert FleetConfig.parse({"model": "m", "version": None}).version == ""
