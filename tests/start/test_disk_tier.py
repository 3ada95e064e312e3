"""Contexts on disk on the real runner: sessions go on after a restart, with the same tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jinfercept.config import CacheOptions, EngineConfig
from jinfercept.engine.streaming import serve
from jinfercept.errors import ConfigError
from jinfercept.llm import LLM
from jinfercept.outputs import RequestOutput
from jinfercept.request import FollowUp, Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.start.disk_tier import open_store
from tests.support.tiny_model import count_ties, tiny_llm

PROMPT = tuple(np.random.default_rng(0).integers(0, 128, 70).tolist())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with tiny_llm(kv_tokens=160, swap_space=0.001, kv_disk=str(folder), kv_disk_space=0.01) as llm:
        yield llm


def turn(llm: LLM, prompt: tuple[int, ...], salt: str = "", name: str = "llama_gqa") -> RequestOutput:
    """A turn whose context is retained; its tokens are the greedy ones."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    [output] = serve(llm.engine.thread, [Request("turn", prompt, params, follow_up=FollowUp(), cache_salt=salt)])
    count_ties(name, output)
    return output


def stream(output: RequestOutput) -> tuple[int, ...]:
    return (*output.prompt_token_ids, *output.outputs[0].token_ids)


def test_a_session_goes_on_with_empty_pages_without_recomputing(llm: LLM) -> None:
    history = stream(turn(llm, PROMPT))
    llm.restart()
    output = turn(llm, (*history, 5, 6, 7))
    assert output.num_cached_tokens == 76  # of 81: all full pages of the 77 that were computed
    assert llm.disk is not None
    assert llm.disk.counters.read_bytes > 0
    llm.restart(policy="lru_host")
    assert turn(llm, (*stream(output), 8, 9)).num_cached_tokens == 88
    llm.engine.check_pages()


@pytest.mark.parametrize("name", ["qwen3_next", "gemma4", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_states_and_windows_come_back_from_disk_with_the_pages_that_a_llama_reuses(name: str, tmp_path: Path) -> None:
    flags = {} if name == "qwen3_next" else {"num_window_tokens": 400}
    sizes = {"kv_tokens": 160, "swap_space": 0.001, "kv_disk": str(tmp_path), "kv_disk_space": 0.01}
    with tiny_llm(name, **sizes, **flags) as llm:
        history = stream(turn(llm, PROMPT, name=name))
        llm.restart()
        output = turn(llm, (*history, 5, 6, 7), name=name)
        assert output.num_cached_tokens == 76
        llm.restart()
        assert turn(llm, (*PROMPT, 9, 8), name=name).num_cached_tokens == 68  # without the answer
        llm.restart()
        for data in sorted(tmp_path.glob("data-*"), key=lambda path: path.stat().st_mtime_ns)[::2]:
            data.write_bytes(bytes(data.stat().st_size))
        again = turn(llm, (*stream(output), 8, 9), name=name)
        assert again.num_cached_tokens is not None
        assert again.num_cached_tokens < 88
        llm.engine.check_pages()


def test_contexts_of_other_tenants_and_weights_and_damaged_ones_are_missing(llm: LLM, folder: Path) -> None:
    turn(llm, PROMPT, salt="a")
    llm.restart()
    assert turn(llm, PROMPT, salt="b").num_cached_tokens == 0
    assert turn(llm, PROMPT, salt="a").num_cached_tokens == 68
    params = jax.tree.map(np.array, llm.params)
    llm.update_weights(params._replace(head=jax.tree.map(lambda weight: weight + 1e-6, params.head)))
    request = Request("other", PROMPT, SamplingParams(max_tokens=1), cache_salt="a")
    assert serve(llm.engine.thread, [request])[0].num_cached_tokens == 0
    llm.update_weights(params)
    for data in folder.glob("data-*"):
        data.write_bytes(bytes(data.stat().st_size))
    assert turn(llm, PROMPT, salt="a").num_cached_tokens == 0
    assert llm.disk is not None
    assert llm.disk.counters.damaged_pages > 0


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ({"kv_disk": "x", "swap_space": 0}, "swap_space"),
        ({"kv_disk": "x", "enable_prefix_caching": False}, "prefix caching"),
        ({"kv_disk": "x", "kv_disk_space": -1.0}, "too small"),
        ({"kv_disk": "x", "num_hosts": 2}, "several hosts"),
    ],
)
def test_options_that_cannot_work_together_are_refused(flags: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        EngineConfig.from_options(flags)


def test_limits_without_a_folder_are_refused() -> None:
    with pytest.raises(ConfigError, match="kv_disk_space needs kv_disk"):
        open_store(CacheOptions(kv_disk_space=1.0))
