"""Layers per executable: what is worth a try, the rule of choice, and that a start finds what the profiler has chosen."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jinfercept.cli.main import main
from jinfercept.config import EngineConfig
from jinfercept.llm import LLM
from jinfercept.models.load import load
from jinfercept.models.model import Model
from jinfercept.runner.executables import silent
from jinfercept.runner.shape import RunnerShape
from jinfercept.sched.plan import StepPlan
from jinfercept.startup import sizing
from jinfercept.startup.layer_groups import (
    ENOUGH_S,
    SLACK,
    CandidateTiming,
    candidates,
    choose,
    compare,
    relative_costs,
    remember_layers,
    remembered_layers,
    timed_steps,
    tolerated,
)
from tests.support.tiny_model import GOLDEN, tiny_llm

SECONDS = st.floats(1e-4, 10.0)
COSTS = st.integers(1, 3).flatmap(
    lambda plans: st.dictionaries(
        st.integers(1, 100), st.lists(SECONDS, min_size=plans, max_size=plans), min_size=1, max_size=6
    )
)
SHAPE = RunnerShape(num_pages=64, page_size=4, max_num_seqs=8, max_model_len=100, buckets=(1, 8, 32), layers_per_step=1)


UNREADABLE = ("0", "31", "true", '"2"', "2.0", "null")


# -- candidates and the rule -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_layers", "parts", "wanted"),
    [
        (1, 1, (1,)),
        (2, 1, (1, 2)),
        (12, 1, (1, 2, 4, 6, 12)),
        (28, 1, (1, 2, 4, 7, 14, 28)),
        (30, 1, (1, 2, 4, 8, 15, 30)),
        (32, 1, (1, 2, 4, 8, 16, 32)),
        (32, 4, (1, 2, 4, 8)),
        (3, 9, (1,)),
    ],
)
def test_candidates_are_powers_of_two_or_as_many_but_more_even_groups(
    num_layers: int, parts: int, wanted: tuple[int, ...]
) -> None:
    assert candidates(num_layers, parts) == wanted


@given(num_layers=st.integers(1, 200), parts=st.integers(1, 40))
def test_every_part_of_a_transfer_keeps_a_group_under_every_candidate(num_layers: int, parts: int) -> None:
    tried = candidates(num_layers, parts)
    assert tried[0] == 1
    assert len(tried) <= 6
    for layers in tried:
        assert 1 <= layers <= num_layers
        assert -(-num_layers // layers) >= min(parts, num_layers)


@given(costs=COSTS, slack=st.floats(0.0, 0.3))
def test_the_choice_is_as_good_as_the_best_and_nothing_smaller_is(costs: dict[int, list[float]], slack: float) -> None:
    relative, chosen = relative_costs(costs), choose(costs, slack)
    assert min(relative.values()) == 1
    assert relative[chosen] <= 1 + slack
    assert all(relative[layers] > 1 + slack for layers in costs if layers < chosen)


@given(costs=COSTS, factor=st.floats(0.1, 10.0))
def test_a_machine_that_is_slower_at_everything_chooses_the_same(costs: dict[int, list[float]], factor: float) -> None:
    scaled = {layers: [factor * seconds for seconds in row] for layers, row in costs.items()}
    assert relative_costs(scaled) == pytest.approx(relative_costs(costs))


def test_what_turns_of_one_candidate_differ_by_is_tolerated() -> None:
    quiet, noisy, disturbed = (CandidateTiming(1.0, again_s, 0.1) for again_s in (1.001, 1.1, 2.0))
    assert tolerated([quiet, quiet, disturbed]) == SLACK
    assert tolerated([quiet, noisy, disturbed]) == pytest.approx(0.1)


# -- timing ------------------------------------------------------------------------------------------------------------


class Machine:
    """Its time, and a bill of who had pages when."""

    def __init__(self) -> None:
        self.now_s, self.num_pools, self.order = 0.0, 0, list[int]()


class PricedRunner:
    """The host's time goes by executables, the device's by tokens; each works while the other does."""

    def __init__(self, machine: Machine, num_executables: int, host_s: float, token_s: float) -> None:
        self.machine, self.num_executables = machine, num_executables
        self.host_s, self.token_s = host_s, token_s
        self.free_s, self.has_pages, self.under_way = 0.0, False, 0

    def update(self, params: Any) -> None:
        self.machine.num_pools += 1
        self.machine.order.append(self.num_executables)
        assert self.machine.num_pools == 1
        self.tables = set[int]()

    def close(self) -> None:
        self.machine.num_pools -= 1
        assert self.under_way == 0

    def submit(self, plan: StepPlan) -> float:
        self.under_way += 1
        assert self.under_way <= 2  # one ahead
        self.tables |= {chunk.slot for chunk in plan.chunks if chunk.new_pages}
        assert self.tables >= {chunk.slot for chunk in plan.chunks}
        self.machine.now_s += self.host_s * self.num_executables
        self.free_s = max(self.free_s, self.machine.now_s) + self.token_s * plan.num_tokens
        return self.free_s

    def collect(self, ticket: float) -> None:
        self.under_way -= 1
        self.machine.now_s = max(self.machine.now_s, ticket)


def compared(host_s: float, token_s: float) -> tuple[dict[int, list[CandidateTiming]], Machine]:
    machine = Machine()
    _, plans = timed_steps(SHAPE)
    runners = {layers: PricedRunner(machine, 12 // layers, host_s, token_s) for layers in (1, 4, 12)}
    return compare(runners, None, plans, clock=lambda: machine.now_s), machine


def test_what_the_host_dispatches_beside_a_busy_device_costs_nothing() -> None:
    turns, machine = compared(host_s=0.0001, token_s=0.01)
    seconds = {layers: [turn.seconds for turn in row] for layers, row in turns.items()}
    assert choose(seconds, SLACK) == 1
    assert seconds[12] == pytest.approx([0.01, 0.08, 0.32], rel=0.02)
    assert turns[1][0].dispatch_s == pytest.approx(0.0012)
    assert machine.order[:6] == [12, 3, 1, 12, 3, 1]
    assert machine.num_pools == 0


def test_a_host_that_cannot_keep_up_asks_for_larger_groups() -> None:
    turns, _ = compared(host_s=0.01, token_s=0.001)
    seconds = {layers: [turn.seconds for turn in row] for layers, row in turns.items()}
    assert seconds[1][0] == pytest.approx(0.12, rel=0.05)
    assert choose(seconds, SLACK) == 12


def test_steps_that_take_long_are_timed_once_each() -> None:
    turns, machine = compared(host_s=0.0, token_s=ENOUGH_S)
    assert [turn.seconds for turn in turns[1]] == pytest.approx([ENOUGH_S, 8 * ENOUGH_S, 32 * ENOUGH_S])
    assert machine.order == [12, 3, 1] * 3


def test_the_timed_steps_decode_alone_together_and_beside_a_chunk() -> None:
    shape, plans = timed_steps(SHAPE)
    assert shape.buckets == (1, 8, 32)
    assert [[len(chunk.tokens) for chunk in plan.chunks] for plan in plans] == [[1], [1] * 8, [1] * 7 + [25]]
    assert shape.num_pages == 8 + 8
    for plan in plans:
        assert all(
            1 <= page <= shape.num_pages for chunk in plan.chunks if chunk.new_pages for page in chunk.new_pages.slots
        )


# -- between starts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["", "half of a fi", "[]", "{}", "3", "[" * 100_000, *(f'{{"layers_per_step": {value}}}' for value in UNREADABLE)],
)
def test_a_choice_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "choice.json"
    assert remembered_layers(path, 30) is None
    path.write_text(text)
    assert remembered_layers(path, 30) is None
    remember_layers(path, 8, {"device": "cpu"})
    assert remembered_layers(path, 30) == 8
    assert remembered_layers(path, 7) is None


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of timing are short: the choice is measured, but need not be good."""
    monkeypatch.setattr("jinfercept.startup.layer_groups.TURN_S", 0.01)


def small_llm(profile: str = "paper-gptj-6b-a100", **flags: Any) -> LLM:
    return tiny_llm(kv_tokens=64, max_num_seqs=2, max_num_batched_tokens=8, profile=profile, **flags)


COMMAND = ["profile", str(GOLDEN / "llama_gqa"), "--page-size", "4", "--kv-tokens", "64", "--max-num-seqs", "2"]
COMMAND += ["--max-num-batched-tokens", "8", "--dtype", "float32"]


@pytest.mark.usefixtures("briefly")
def test_the_command_chooses_and_later_starts_do_as_it_chose(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    with small_llm() as llm:
        assert "layers by 1, the default" in str(llm.start_times)
    out = tmp_path / "profile.json"
    assert main([*COMMAND, "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert "layers per executable" in shown.out
    assert ", measured; profile measured" in shown.err
    groups = json.loads(out.read_text())["tables"]["groups"]
    assert [row["layers_per_step"] for row in groups] == list(candidates(llm.model.config.num_layers))
    (chosen,) = (row["layers_per_step"] for row in groups if row["chosen"])
    (file,) = cache.glob("profiles/*.layers.json")
    assert remembered_layers(file, 100) == chosen

    other = 1 + chosen % 3  # as if it had chosen another one
    file.write_text(json.dumps({"layers_per_step": other}))
    with small_llm() as llm:
        assert llm.shape.layers_per_step == other
        assert f"layers by {other}, remembered" in str(llm.start_times)
    with small_llm(layers_per_step=chosen) as llm:
        assert llm.shape.layers_per_step == chosen
        assert f"layers by {chosen}, as given" in str(llm.start_times)


@pytest.mark.parametrize(
    ("platform", "parts", "layers"), [("cpu", 1, 1), ("gpu", 1, 30), ("gpu", 2, 15), ("gpu", 3, 10)]
)
def test_by_default_all_layers_whose_pages_cross_together_are_one_executable_on_a_gpu(
    platform: str, parts: int, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [SimpleNamespace(platform=platform, device_kind="any")]
    monkeypatch.setattr(sizing, "_mesh", lambda _: SimpleNamespace(devices=devices))
    loaded = load(GOLDEN / "llama_gqa", dtype="float32")
    model = Model(replace(loaded.model.config, num_layers=30))
    config = EngineConfig.from_options({"transfer_parts": parts})
    assert sizing.group_layers(model, loaded.params, config, None, silent)[:2] == (layers, "the default")


def test_a_quick_measurement_tries_nothing(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--quick"]) == 0
    assert "layers per executable" not in capsys.readouterr().out
    assert not list(cache.glob("profiles/*.layers.json"))


@pytest.mark.usefixtures("briefly")
def test_a_cache_that_cannot_be_written_does_not_matter(cache: Path) -> None:
    (cache / "profiles").write_text("a file where the folder would be")
    with small_llm(profile="measure") as llm:
        assert "measured; profile measured" in str(llm.start_times)
        assert [row["chosen"] for row in llm.profile.tables["groups"]].count(True) == 1
