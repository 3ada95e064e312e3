"""Plans of fleets: how many replicas are needed, which machines, and what the file of a deployment says."""

from collections.abc import Callable
from random import Random

import pytest
import yaml

from jinfercept.cli.main import main
from jinfercept.config import EngineConfig
from jinfercept.errors import ConfigError
from jinfercept.meter.turns import LatencyLimits
from jinfercept.planner.sizing import (
    FleetLoad,
    Sizing,
    accelerator_kind,
    deployment,
    play_fleet,
    profile_kind,
    ranked,
    size_fleet,
)
from jinfercept.sim.workload import Script, Segment

OPTIONS = {"policy": "copy_ahead", "max_model_len": 8192}
KIND = profile_kind("paper-gptj-6b-a100-attention", None, None, 1.0, **OPTIONS)


def agents(rng: Random) -> Callable[[], Script]:
    def draw() -> Script:
        turns = [Segment(rng.randint(4, 12), 1.0, rng.randint(200, 600)) for _ in range(3)]
        return Script("agent", rng.randint(500, 1500), (*turns, Segment(8, None, 0)))

    return draw


LOAD = FleetLoad(agents, 12.0, 60.0, 500, LatencyLimits(0.4, 0.04), 0.95)


@pytest.fixture(scope="module")
def sizing() -> Sizing:
    return size_fleet(KIND, LOAD, 16, "coarse")


def test_a_plan_meets_the_limits_one_replica_fewer_does_not_and_another_seed_agrees(sizing):
    assert 1 < sizing.replicas < 16
    assert sizing.report.good_share >= LOAD.share
    assert sizing.fewer is not None
    assert sizing.fewer.good_share < LOAD.share
    assert 0.0 < sizing.report.busy_share <= 1.0
    other = LOAD._replace(seeds=(1,))
    assert play_fleet(KIND, sizing.replicas, other, "coarse").good_share >= 0.9
    assert play_fleet(KIND, sizing.replicas - 1, other, "coarse").good_share < LOAD.share


def test_engines_that_step_have_the_last_word():
    short = LOAD._replace(duration_s=4.0)
    sizing = size_fleet(KIND, short, 16)
    assert sizing.report.good_share >= LOAD.share
    assert sizing.tried[sizing.replicas] == sizing.report.good_share
    assert sizing.replicas == 1 or sizing.tried[sizing.replicas - 1] < LOAD.share


def test_kinds_are_ordered_by_cost_and_those_that_never_do_come_last(sizing):
    impossible = LOAD._replace(limits=LatencyLimits(1e-6, 1e-6), duration_s=2.0)
    never = size_fleet(KIND, impossible, 2, "coarse")
    assert never.replicas == 0
    assert never.cost == float("inf")
    dear = sizing._replace(kind=KIND._replace(price_per_h=3.0))
    assert ranked([never, dear, sizing]) == [sizing, dear, never]


def test_machines_come_from_data_sheets_or_profiles():
    four = accelerator_kind("llama-3-70b", "4xH100", None, None, 2.0, **OPTIONS)
    assert (four.num_devices, four.device, four.cost(3)) == (4, "H100", 24.0)
    assert four.simulation.kv_tokens > 100_000
    assert four.simulation.host_tokens == 4 * four.simulation.kv_tokens
    with pytest.raises(ConfigError, match="llama-3-8b"):
        accelerator_kind("llama-3-9b", "H100", None, None, 1.0, **OPTIONS)
    with pytest.raises(ConfigError, match="H100"):
        accelerator_kind("llama-3-8b", "H1000", None, None, 1.0, **OPTIONS)
    with pytest.raises(ConfigError, match="4xH100"):
        accelerator_kind("llama-3-8b", "axH100", None, None, 1.0, **OPTIONS)
    with pytest.raises(ConfigError, match="do not fit"):
        accelerator_kind("llama-3-70b", "T4", None, None, 1.0, **OPTIONS)


def test_a_deployment_has_options_that_the_engine_takes():
    whole, kind = (
        accelerator_kind("llama-3-8b", "2xL40S", None, None, 1.0, dtype, **OPTIONS) for dtype in ("auto", "int8")
    )
    assert kind.simulation.kv_tokens / whole.simulation.kv_tokens == pytest.approx(256 / 132, rel=1e-4)
    sizing = size_fleet(kind, LOAD._replace(duration_s=5.0), 4, "coarse")
    values = yaml.safe_load(yaml.safe_dump(deployment(sizing, "meta-llama/Llama-3.1-8B")))
    assert values["replicas"] == sizing.replicas
    config = EngineConfig.from_options(values["engine"])
    assert (config.model.tensor_parallel_size, config.cache.kv_cache_dtype) == (2, "int8")
    assert config.cache.kv_tokens == sizing.kind.simulation.kv_tokens


def test_the_command_prints_a_table_and_writes_its_files(tmp_path, capsys):
    files = {flag: tmp_path / f"plan.{flag}" for flag in ("yaml", "json")}
    words = [
        "plan",
        "llama-3-8b",
        "--accelerator",
        "H100",
        "--profile",
        "paper-gptj-6b-a100",
        "--rate",
        "4",
        "--coarse",
    ]
    words += ["--duration", "10", "--workload", "math", "--shared-tokens", "0", "--check-seed", "1"]
    words += [word for flag, path in files.items() for word in (f"--{flag}", str(path))]
    assert main([*words, "--plot", str(tmp_path / "plan.png")]) in (0, 1)
    printed = capsys.readouterr().out
    assert "H100" in printed
    assert "seeds 1" in printed
    assert yaml.safe_load(files["yaml"].read_text())["model"] == "llama-3-8b"
    assert (tmp_path / "plan.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rate", "1"], "--accelerator H100"),
        (["--accelerator", "H100"], "--rate"),
        (["--accelerator", "H100", "--rate", "1", "--share", "2"], "--share"),
        (["--accelerator", "H100", "--rate", "1", "--price", "A100=2"], "--price"),
        (["--accelerator", "H100", "--rate", "0"], "rate"),
        (["--accelerator", "H100", "--rate", "1e-9", "--duration", "1"], "no request would arrive"),
        (["--accelerator", "H100", "--rate", "1", "--kv-cache-dtype", "int4"], "no such --kv-cache-dtype"),
        (["--profile", "paper-gptj-6b-a100", "--rate", "1", "--kv-cache-dtype", "int8"], "jinfercept profile"),
    ],
)
def test_options_that_make_no_sense_are_refused(words, says, capsys):
    assert main(["plan", "llama-3-8b", *words]) == 2
    assert says in capsys.readouterr().err
