"""Profiles: what they price, what files are refused, the named ones, and rooflines."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jinfercept.engine.meter.ledger import Prices
from jinfercept.errors import ConfigError
from jinfercept.kv.page import PageCopy
from jinfercept.sched.named_profiles import (
    ACCELERATORS,
    LLAMA_2_7B,
    LLAMA_3_70B,
    LLAMA_13B,
    PROFILES,
    load_profile,
    roofline,
)
from jinfercept.sched.plan import FROM_DEVICE, Chunk, Sample, StepPlan
from jinfercept.sched.profile import Profile

MEASURED = Profile(
    name="tiny on a desk",
    source="measured",
    fixed_s=-0.01,
    per_query_s=0.001,
    per_context_s=1e-6,
    flat_s=0.05,
    saturation=60,
    link_out_tokens_per_s=3000.0,
    link_in_tokens_per_s=2000.0,
    link_both_tokens_per_s=4000.0,
    kv_bytes_per_token=1024,
    dispatch_s=0.0002,
    tables={"step_s": [[1, 0.05], [128, 0.118]]},
)


def test_a_step_costs_the_floor_or_the_line_and_its_context() -> None:
    cost = MEASURED
    assert cost.step_s(0, 0) == 0.05
    assert cost.step_s(60, 0) == pytest.approx(0.05)
    assert cost.step_s(110, 1000) == pytest.approx(0.101)


STAIRS = replace(MEASURED, bucket_tokens=(1, 8, 32), bucket_s=(0.05, 0.06, 0.1), per_pair_s=1e-5)


def test_with_buckets_a_step_costs_what_runs_it() -> None:
    assert [STAIRS.step_s(tokens, 0) for tokens in (0, 1, 2, 8, 9, 32)] == [0.05, 0.05, 0.06, 0.06, 0.1, 0.1]
    assert STAIRS.step_s(48, 0) == pytest.approx(0.15)  # one and a half of the largest
    assert STAIRS.step_s(8, 1000) == pytest.approx(0.061)


def test_a_plan_costs_its_step_and_what_its_chunks_look_back_at() -> None:
    sample = Sample(0.0, 0)
    chunks = (Chunk(0, 99, (FROM_DEVICE,), (), sample), Chunk(1, 200, (7,) * 5, (), None))
    plan = StepPlan(0, 32, chunks)
    assert STAIRS.plan_s(plan) == pytest.approx(0.06 + 1e-6 * (100 + 205) + 1e-5 * 5 * 200)
    paper = load_profile("paper-gptj-6b-a100")
    assert paper.plan_s(plan) == paper.step_s(6, 0)


def test_the_link_is_counted_at_its_worse_direction() -> None:
    assert MEASURED.link_tokens(0.5) == 1000
    assert MEASURED.swap_s(1000) == 0.5
    assert replace(MEASURED, link_both_tokens_per_s=1000.0).link_tokens(0.5) == 500


def test_a_swap_costs_its_copies_and_its_bytes() -> None:
    by_layer = replace(MEASURED, copy_s=0.001, copy_tokens=0.25)  # 64 copies for a page of 16 tokens
    assert by_layer.copies_s(16) == pytest.approx(0.064)
    assert by_layer.swap_s(16) == pytest.approx(0.064 + 16 / 2000)
    assert by_layer.swap_s(by_layer.link_tokens(1.0)) == pytest.approx(1.0, rel=0.01)
    whole = replace(by_layer, copy_tokens=0.0)
    assert whole.swap_s(1600) == pytest.approx(0.001 + 0.8)
    assert whole.link_tokens(0.801) == 1600
    assert whole.link_tokens(0.0001) == whole.copies_s(0) == 0
    assert Prices(by_layer, 16, synchronous=True)(StepPlan(0, 0, offload=(PageCopy(1, 0),) * 2)).stall_s == (
        pytest.approx(by_layer.swap_s(32))
    )


@pytest.mark.parametrize("chunk", [7, 100, 384, 5000])
def test_recomputing_costs_the_plans_that_recompute(chunk: int) -> None:
    for profile in (STAIRS, load_profile("paper-gptj-6b-a100"), roofline(LLAMA_13B, "A100-80GB", attention=True)):
        for tokens in (1, 100, 384, 1000):
            starts = range(0, tokens, chunk)
            chunks = [Chunk(0, start, (7,) * min(chunk, tokens - start), (), None) for start in starts]
            whole = sum(profile.plan_s(StepPlan(0, 0, (piece,))) for piece in chunks)
            assert profile.recompute_s(tokens, chunk) == pytest.approx(whole, rel=1e-6)


def test_without_a_link_nothing_moves() -> None:
    cut = replace(MEASURED, link_out_tokens_per_s=0.0)
    assert cut.link_tokens(10.0) == 0
    assert cut.swap_s(0) == 0.0
    assert cut.swap_s(1) == math.inf


def test_a_saved_profile_is_the_same_when_loaded(tmp_path: Path) -> None:
    for profile in (MEASURED, STAIRS, *PROFILES.values()):
        profile.save(tmp_path / "profile.json")
        assert load_profile(tmp_path / "profile.json") == profile
        assert load_profile(str(tmp_path / "profile.json")) == profile


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"version": 2}, "not a profile of version 1; got version 2"),
        ({"version": None}, "not a profile of version 1"),
        ({"colour": "red", "size": 3}, "unexpected keyword argument 'colour'"),
        ({"per_query_s": -1e-3}, "per_query_s is wrong; got -0.001; fix: a finite number, at least 0"),
        ({"flat_s": 0.0}, "fixed_s is negative and no flat_s holds it up; got -0.01"),
        ({"link_in_tokens_per_s": "fast"}, "link_in_tokens_per_s is wrong; got 'fast'"),
        ({"fixed_s": float("nan")}, "fixed_s is wrong; got nan"),
        ({"dispatch_s": True}, "dispatch_s is wrong; got True"),
        ({"saturation": 0}, "saturation is wrong; got 0; fix: a whole number, 1 to 1,000,000"),
        ({"saturation": 60.5}, "saturation is wrong; got 60.5"),
        ({"saturation": 10**9}, "profile.json: a profile's saturation is wrong; got 1000000000"),
        ({"flat_s": 10**400}, "flat_s is wrong; got 1000"),
        ({"kv_bytes_per_token": 10**400}, "kv_bytes_per_token is wrong; got 1000"),
        ({"bucket_s": [1.0, 10**400]}, "bucket_s is wrong"),
        ({"source": "guessed"}, "source is wrong; got 'guessed'; fix: one of paper, roofline, measured"),
        ({"name": ""}, "a profile's name is wrong"),
        ({"tables": [1, 2]}, "a profile's tables is wrong; got [1, 2]"),
        ({"bucket_tokens": [1, 8]}, "a profile must have one time for each bucket; got 2 and 0"),
        ({"bucket_tokens": [8, 1]}, "bucket_tokens is wrong; got (8, 1); fix: numbers that ascend from above 0"),
        ({"bucket_s": [0.0, 1.0]}, "bucket_s is wrong"),
        ({"bucket_s": 3.0}, "bucket_s is wrong; got 3.0"),
    ],
)
def test_a_file_that_is_no_profile_says_what_is_wrong(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    MEASURED.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError) as caught:
        load_profile(path)
    assert complaint in str(caught.value)


def test_a_file_of_too_many_brackets_or_digits_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for text in ("[" * 100_000, f'{{"version": {"1" * 5000}}}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"profile\.json is not JSON"):
            load_profile(path)


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    for name in ("paper-gpt-9", tmp_path / "missing.json", tmp_path):
        with pytest.raises(ConfigError, match=r"no such profile; got .*one of paper-gptj-6b-a100, paper-vicuna"):
            load_profile(name)


def test_the_papers_constants_are_the_papers() -> None:
    gptj, vicuna = load_profile("paper-gptj-6b-a100"), load_profile("paper-vicuna-13b-2xa100")
    assert gptj.step_s(384, 50_000) == pytest.approx(0.0277792)  # reading context is free
    assert gptj.link_both_tokens_per_s * gptj.step_s(384, 0) == pytest.approx(605.5)
    assert gptj.kv_bytes_per_token == 448 * 1024
    assert vicuna.step_s(384, 0) == pytest.approx(0.0154 + 384 * 0.0279e-3)
    assert vicuna.link_both_tokens_per_s * vicuna.step_s(384, 0) == pytest.approx(318.8)
    assert vicuna.kv_bytes_per_token == 800 * 1024
    assert {(profile.source, profile.saturation) for profile in (gptj, vicuna)} == {("paper", 384)}


def test_attention_is_added_to_the_papers_constants() -> None:
    plain, reading = load_profile("paper-gptj-6b-a100"), load_profile("paper-gptj-6b-a100-attention")
    assert reading.step_s(384, 0) == plain.step_s(384, 0)
    assert reading.step_s(384, 50_000) == pytest.approx(0.0277792 + 50_000 * 448 * 1024 / (1.555e12 * 0.9))
    assert reading.recompute_s(2000, 2000) > plain.recompute_s(2000, 2000)


def test_a_roofline_follows_from_the_data_sheet() -> None:
    profile = load_profile("roofline-llama-13b-a100")
    assert profile.source == "roofline"
    assert profile.flat_s == pytest.approx(26.032e9 / (2.039e12 * 0.9))  # 14.2 ms to read the weights
    assert profile.per_query_s == pytest.approx(26.032e9 / (312e12 * 0.8))  # 0.104 ms a token
    assert profile.saturation == 136  # 14.186 / 0.1043
    assert profile.kv_bytes_per_token == 800 * 1024
    assert profile.per_context_s == pytest.approx(819_200 / (2.039e12 * 0.9))
    assert profile.link_out_tokens_per_s == pytest.approx(26e9 / 819_200)
    assert profile.tables["derived"]["kv_tokens"] == int((72e9 - 26.032e9) // 819_200)


def test_several_gpus_share_weights_contexts_and_links() -> None:
    single, four = roofline(LLAMA_13B, "A100-80GB"), roofline(LLAMA_13B, "A100-80GB", 4)
    assert four.name == "roofline-llama-13b-4xa100-80gb"
    assert single.step_s(0, 9000) == pytest.approx(4 * (four.step_s(0, 9000) - 80 * 10e-6))  # two collectives a layer
    exchanged = 80 * 1.5 * 5120 * 2 / (300e9 * 0.8)  # a ring of four sends three quarters twice
    assert single.step_s(500, 9000) == pytest.approx(4 * (four.step_s(500, 9000) - 80 * 10e-6 - 500 * exchanged))
    assert four.link_in_tokens_per_s == pytest.approx(4 * single.link_in_tokens_per_s)
    assert four.saturation == single.saturation


def test_every_accelerator_of_the_table_prices_a_step() -> None:
    for accelerator in ACCELERATORS:
        profile = roofline(LLAMA_2_7B, accelerator, 2)
        assert 0 < profile.step_s(1, 1) < profile.step_s(4096, 4096)


def test_weights_that_do_not_fit_and_unknown_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="weights of llama-3-70b do not fit; got 141 GB on 1 × A100-80GB"):
        roofline(LLAMA_3_70B, "A100-80GB")
    with pytest.raises(ConfigError, match="no such accelerator in the table; got H1000; fix: one of A100-40GB"):
        roofline(LLAMA_13B, "H1000")
