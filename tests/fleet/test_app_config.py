"""What Ray gives to a fleet: the arguments of its application, and the number of its replicas."""

import math
import shlex
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from jinfercept.cli.command import parse_command_line
from jinfercept.cli.main import COMMANDS, PROG
from jinfercept.errors import ConfigError
from jinfercept.fleet.app_config import FleetConfig, ReplicaRange, replicas_by_memory
from tests.support.docs_blocks import blocks_of
from tests.support.docs_reader import commands_in


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "valid dictionary"),
        ({}, "model: Field required"),
        ({"model": 3}, "model: Input should be a valid string"),
        ({"model": "m", "replica": 3}, "replica: Extra inputs"),
        ({"model": "m", "replicas": 0}, "replicas.min: Input should be greater"),
        ({"model": "m", "replicas": {"min": 3, "max": 2}}, "min is larger than max"),
        ({"model": "m", "replicas": True}, "replicas.min: Input should be a valid integer"),
        ({"model": "m", "engine": {"kv_token": 3}}, "did you mean 'kv_tokens'"),
        ({"model": "m", "server": {"prot": 3}}, "did you mean 'port'"),
        ({"model": "m", "server": {"port": "x"}}, "wrong type"),
        ({"model": "m", "server": {"port": 70000}}, "65535"),
        ({"model": "m", "server": {"port": True}}, "port has the wrong type"),
        ({"model": "m", "server": {"drain_timeout": math.inf}}, "drain_timeout is not finite"),
        ({"model": "m", "server": {"state_url": " "}}, "state_url names no database"),
        ({"model": "m", "server": {"api_key": "secret"}}, "api_key has the wrong type; got str; fix: give a list"),
        ({"model": "m", "server": {"api_key": [3]}}, "api_key has the wrong type"),
        ({"model": "m", "server": {"log_format": "xml"}}, "log_format is one of"),
        ({"model": "m", "server": {"mcp": True}}, "a fleet is no MCP server"),
        ({"model": "m", "cpus_per_replica": "many"}, "cpus_per_replica: Input should be a valid number"),
    ],
)
def test_a_wrong_argument_is_said_by_name(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        FleetConfig.parse(data)
    assert "secret" not in str(refused.value)


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
    [application] = yaml.safe_load(file)["applications"]
    config = FleetConfig.parse(application["args"])
    assert (config.replicas, config.server.served_model_name) == (ReplicaRange(min=2, max=8), ("assistant",))
    commands = [line for block in blocks if block.language == "bash" for line in commands_in(block.code)]
    ours = [shlex.split(line, comments=True)[1:] for line in commands if line.startswith("jinfercept")]
    assert ours
    for words in ours:
        parse_command_line(PROG, COMMANDS, words)
