"""A measurement gives the costs of what was measured back, leaves nothing behind, and is remembered."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jinfercept.cli.main import main
from jinfercept.llm import LLM
from jinfercept.runner.shape import RunnerShape
from jinfercept.sched.named_profiles import PROFILES, load_profile
from jinfercept.sched.plan import StepPlan
from jinfercept.sched.profile import Profile
from jinfercept.start import sizing
from jinfercept.start.backend import CompileCounter
from jinfercept.start.profiler import EFFORTS, Effort, measure, profile_path, remember, remembered
from tests.support.tiny_model import Workload, streams, tiny_llm, tiny_setup

BUCKETS = {1: 0.010, 8: 0.010, 32: 0.030, 64: 0.062}
SHAPE = RunnerShape(
    num_pages=64, page_size=4, max_num_seqs=8, max_model_len=100, buckets=tuple(BUCKETS), layers_per_step=1
)


class PricedRunner:
    """A machine whose time passes by a price list, and which checks that pages and host copies are there."""

    def __init__(self, shape: RunnerShape) -> None:
        self.shape, self.now_s, self.num_plans = shape, 0.0, 0
        self.host: set[int] = set()
        self.tables: dict[tuple[int, int], int] = {}
        self.was_reset = False

    def submit(self, plan: StepPlan) -> float:
        self.num_plans += 1
        assert self.host >= {copy.host_slot for copy in plan.fetch}
        self.host -= set(plan.drop)
        self.host |= {copy.host_slot for copy in plan.offload}
        for copy in (*plan.offload, *plan.fetch):
            assert 1 <= copy.device_slot <= self.shape.num_pages
        one_way, both = max(len(plan.offload), len(plan.fetch)), min(len(plan.offload), len(plan.fetch))
        seconds = 0.001 * one_way + 0.0005 * both + (0.002 if one_way and not plan.chunks else 0.0)
        if plan.chunks:
            seconds += self.step_s(plan)
        self.now_s += 0.001  # dispatch
        return max(0.0, seconds - 0.001)

    def step_s(self, plan: StepPlan) -> float:
        assert plan.bucket in self.shape.buckets
        assert plan.num_tokens == plan.bucket
        assert len(plan.chunks) <= min(plan.bucket, self.shape.max_num_seqs)
        context = pairs = 0
        for chunk in plan.chunks:
            end = chunk.start + len(chunk.tokens)
            assert end <= self.shape.max_model_len
            first, slots, *_ = chunk.new_pages or (0, ())
            self.tables |= {(chunk.slot, index): slot for index, slot in enumerate(slots, first)}
            for index in range(-(-end // self.shape.page_size)):
                assert 1 <= self.tables[chunk.slot, index] <= self.shape.num_pages
            context += end
            pairs += chunk.start * len(chunk.tokens) if len(chunk.tokens) > 1 else 0
        return BUCKETS[plan.bucket] + 10e-6 * context + 1e-6 * pairs

    def collect(self, ticket: float) -> None:
        self.now_s += ticket

    def reset(self) -> None:
        self.host.clear()
        self.was_reset = True


class AsynchronousRunner(PricedRunner):
    """The same machine, where steps run while the host dispatches the next ones, for which it takes `dispatch_s`."""

    def __init__(self, shape: RunnerShape, dispatch_s: float = 0.003) -> None:
        super().__init__(shape)
        self.dispatch_s, self.free_s = dispatch_s, 0.0
        self.deepest = 0

    def submit(self, plan: StepPlan) -> float:
        started_s = self.now_s
        seconds = super().submit(plan) + 0.001
        self.now_s = started_s + self.dispatch_s
        self.free_s = max(started_s, self.free_s) + seconds
        self.free_s = max(self.free_s, self.now_s)
        self.deepest = max([self.deepest, *(chunk.start + len(chunk.tokens) for chunk in plan.chunks)])
        return self.free_s

    def collect(self, ticket: float) -> None:
        self.now_s = max(self.now_s, ticket)


def measured(
    effort: Effort, shape: RunnerShape = SHAPE, runner: PricedRunner | None = None
) -> tuple[Profile, PricedRunner]:
    runner = runner or PricedRunner(shape)
    profile = measure(
        runner,
        shape,
        name="a list of prices",
        kv_bytes_per_token=1024,
        effort=effort,
        settings={"device": "paper"},
        asynchronous=isinstance(runner, AsynchronousRunner),
        clock=lambda: runner.now_s,
    )
    assert runner.was_reset
    return profile, runner


def test_a_full_measurement_finds_every_price() -> None:
    profile, _ = measured(EFFORTS["measure"])
    assert dict(zip(profile.bucket_tokens, profile.bucket_s, strict=True)) == pytest.approx(BUCKETS)
    assert profile.per_context_s == pytest.approx(10e-6)
    assert profile.per_pair_s == pytest.approx(1e-6)
    assert profile.saturation == 8
    assert profile.dispatch_s == pytest.approx(0.001)
    assert profile.link_out_tokens_per_s == pytest.approx(4000)
    assert profile.link_in_tokens_per_s == pytest.approx(4000)
    assert profile.link_both_tokens_per_s == pytest.approx(2 * 4 / 0.0015)
    assert profile.copy_s == pytest.approx(0.002)
    steps = profile.tables["steps"]
    assert all(step["profile_s"] == pytest.approx(step["seconds"]) for step in steps)
    assert {step["bucket"] for step in steps if step["depth"] is None} == set(BUCKETS)
    assert [link["pages"] for link in profile.tables["links"]] == [1, 2, 4, 8, 16, 32]


def test_a_quick_measurement_finds_the_steps_and_the_link() -> None:
    profile, runner = measured(EFFORTS["quick"])
    assert profile.bucket_s == pytest.approx(tuple(BUCKETS.values()))
    assert profile.per_context_s == pytest.approx(10e-6)
    assert profile.per_pair_s == pytest.approx(1e-6)
    depths = [(step["bucket"], step["depth"]) for step in profile.tables["steps"] if step["depth"] is not None]
    assert depths == [(8, 0), (8, 92)], "in the widest bucket, up to the longest sequence"
    assert profile.link_out_tokens_per_s == pytest.approx(16 * 4 / (0.016 + 0.002))
    assert profile.copy_s == 0.0
    assert runner.num_plans < 50


def test_the_first_run_of_an_executable_does_not_count_where_it_is_cold() -> None:
    class Cold(AsynchronousRunner):
        """Its steps take two seconds more when a bucket runs for the first time."""

        ran: set[int]

        def step_s(self, plan: StepPlan) -> float:
            is_first = plan.bucket not in self.ran
            self.ran.add(plan.bucket)
            return super().step_s(plan) + 2 * is_first

    runner = Cold(SHAPE)
    runner.ran = set[int]()
    options: dict[str, Any] = {"effort": EFFORTS["quick"], "settings": {}, "asynchronous": True}
    profile = measure(runner, SHAPE, name="x", kv_bytes_per_token=1, clock=lambda: runner.now_s, **options)
    assert profile.bucket_s == pytest.approx(tuple(BUCKETS.values()))


@pytest.mark.parametrize("effort", EFFORTS.values(), ids=EFFORTS)
def test_the_hosts_work_for_a_step_is_hidden_where_the_device_is_asynchronous(effort: Effort) -> None:
    profile, _ = measured(effort, runner=AsynchronousRunner(SHAPE, dispatch_s=0.003))
    assert dict(zip(profile.bucket_tokens, profile.bucket_s, strict=True)) == pytest.approx(BUCKETS)
    assert profile.per_context_s == pytest.approx(10e-6)
    assert profile.per_pair_s == pytest.approx(1e-6)
    assert profile.dispatch_s == pytest.approx(0.003)
    assert all(step["profile_s"] == pytest.approx(step["seconds"]) for step in profile.tables["steps"])


@pytest.mark.parametrize(
    ("make_runner", "deepest", "bucket"), [(PricedRunner, 2048, 8), (AsynchronousRunner, 32_768, 64)]
)
@pytest.mark.parametrize("effort", EFFORTS.values(), ids=EFFORTS)
def test_chunks_are_as_deep_as_the_device_can_afford(
    effort: Effort, make_runner: Callable[[RunnerShape], PricedRunner], deepest: int, bucket: int
) -> None:
    shape = replace(SHAPE, num_pages=20_000, max_model_len=40_000)
    profile, _ = measured(effort._replace(timeout_s=math.inf), shape, make_runner(shape))
    chunks = {step["bucket"]: step["depth"] for step in profile.tables["steps"] if step["depth"]}
    sizes = [8, 32, 64] if effort.every_bucket else [bucket]
    assert chunks == {size: deepest - size for size in sizes}
    assert profile.per_pair_s == pytest.approx(1e-6)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("effort", EFFORTS.values(), ids=EFFORTS)
@pytest.mark.parametrize(
    ("pages", "size", "seqs", "length"),
    [(1, 4, 1, 4), (2, 1, 8, 2), (3, 4, 8, 9), (16, 4, 32, 64), (200, 16, 64, 3200)],
)
def test_every_shape_can_be_measured(
    effort: Effort, pages: int, size: int, seqs: int, length: int, asynchronous: bool
) -> None:
    class Roomy(PricedRunner):
        def step_s(self, plan: StepPlan) -> float:
            assert 0 < plan.num_tokens <= plan.bucket
            assert all(0 < chunk.start + len(chunk.tokens) <= length for chunk in plan.chunks)
            assert len({chunk.slot for chunk in plan.chunks}) == len(plan.chunks) <= min(plan.bucket, seqs)
            return 0.01

    shape = RunnerShape(pages, size, seqs, length, (1, 8, 64), 1)
    runner = Roomy(shape)
    options: dict[str, Any] = {"settings": {}, "asynchronous": asynchronous, "clock": lambda: runner.now_s}
    measure(runner, shape, name="x", kv_bytes_per_token=1, effort=effort, **options)


def test_a_profile_is_remembered_by_all_that_it_depends_on(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": "tiny", "page_size": 16}
    path = profile_path(tmp_path, settings)
    assert profile_path(tmp_path, dict(reversed(settings.items()))) == path
    assert profile_path(tmp_path, settings | {"page_size": 32}) != path
    assert remembered(path) is None
    remember(PROFILES["paper-gptj-6b-a100"].save, path)
    assert remembered(path) == PROFILES["paper-gptj-6b-a100"]
    path.write_text("half of a fi")
    assert remembered(path) is None


# -- with an engine ----------------------------------------------------------------------------------------------------


SMALL: Any = {"kv_tokens": 160, "max_model_len": 100, "profile": None, "lazy": False}


def small_llm(**flags: Any) -> LLM:
    return tiny_llm(**SMALL | flags)


def test_an_engine_measures_itself_once_and_writes_the_same_tokens(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Workload(number=8, seed=1)
    with small_llm(profile="paper-gptj-6b-a100", lazy=True) as llm:
        assert llm.profile == PROFILES["paper-gptj-6b-a100"]
        wanted = streams(work.run(llm))
        assert not list(cache.glob("profiles/*"))
    setup = tiny_setup(**SMALL)
    with LLM(setup) as llm:
        first = llm.profile
        assert first.source == "measured"
        assert first.bucket_tokens == (1, 8, 32)
        assert not setup.runner.kv.host
        counter = CompileCounter()
        assert streams(work.run(llm)) == wanted
        llm.restart(policy="min_waste")
        assert llm.profile is first
        assert streams(work.run(llm)) == wanted
        assert counter.count == 0
        counter.close()
    assert len(list(cache.glob("profiles/*"))) == 1
    with small_llm() as llm:
        assert llm.profile == first
        setup = llm.engine.setup
        model = setup.model, setup.runner.params, setup.shape, setup.config
        assert sizing.remembered_profile(*model) == first
        monkeypatch.setattr(sizing, "MEASUREMENT", sizing.MEASUREMENT + 1)
        assert sizing.remembered_profile(*model) is None, "it was measured in another way"


def test_an_unknown_profile_is_refused_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "no/such/model", "--profile", "fastest", "--prompt", "x"]) == 2
    assert "no such profile; got fastest; fix: a JSON file, or one of" in capsys.readouterr().err


def test_the_command_shows_and_writes_what_it_measured(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    out = tmp_path / "profile.json"
    model = str(Path(__file__).parents[1] / "golden" / "llama_gqa")
    flags = ["--page-size", "4", "--kv-tokens", "160", "--max-num-seqs", "8", "--max-num-batched-tokens", "32"]
    flags += ["--max-model-len", "100", "--dtype", "float32", "--layers-per-step", "1"]
    assert main(["profile", model, *flags, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    for words in ("S: ", "link: ", "line: max(", "dispatch: "):
        assert words in shown
    profile = load_profile(out)
    assert profile.source == "measured"
    assert profile.tables["settings"]["page_size"] == 4
    with small_llm() as llm:
        assert llm.profile == profile  # remembered


def test_the_command_refuses_files_that_it_could_not_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "smollm2-135m", "--out", str(tmp_path / "nowhere" / "profile.json")]) == 2
    assert "--out cannot be written" in capsys.readouterr().err
