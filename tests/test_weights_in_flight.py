"""Weights that change or fail to while requests run: which tokens are of which weights, and what becomes of requests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jinfercept.calls import Call, Tool
from jinfercept.chat.detector import ScriptedDetector
from jinfercept.engine.streaming import Stream
from jinfercept.errors import ConfigError, EngineError, ModelError, RequestError
from jinfercept.events import Intercepted, Token
from jinfercept.llm import LLM
from jinfercept.models.joined_weights import separate
from jinfercept.models.load import load
from jinfercept.models.model import untied
from jinfercept.models.protocol import Params
from jinfercept.outputs import CompletionOutput
from jinfercept.sampling_params import SamplingParams
from jinfercept.start.backend import CompileCounter
from tests.support.gate import closed_gate
from tests.support.tiny_model import GOLDEN, tiny_llm, tiny_setup

LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
PROMPT = list(range(20))


def weights_of(llm: LLM) -> tuple[Params, Params]:
    """The served weights and others, on the host."""
    whole = untied(llm.model.config, separate(llm.params))  # pyright: ignore[reportArgumentType]
    embed, layers, head = jax.tree.map(np.array, whole)
    return Params(embed, layers, head), Params(embed, layers[::-1], head)


def output_of(stream: Stream) -> CompletionOutput:
    [output] = stream.outputs.values()
    return output.outputs[0]


def alone(llm: LLM, tokens: list[int], number: int) -> list[int]:
    """The next tokens behind these, of an idle engine."""
    params = SamplingParams(temperature=0.0, max_tokens=number, ignore_eos=True)
    return llm.generate({"prompt_token_ids": tokens}, params)[0].outputs[0].token_ids


@contextmanager
def paused(llm: LLM, number: int = 1) -> Iterator[list[Stream]]:
    """Streams that wait for a call after 6 tokens, until the end of the context."""
    go = threading.Event()
    tool = Tool(lambda argument: (go.wait(60), [3, 1, 4])[1], name="wait")
    detectors = [ScriptedDetector({6: [Call("wait", "")]}) for _ in range(number)]
    prompts = [{"prompt_token_ids": [*PROMPT, index]} for index in range(number)]
    streams = [
        llm.stream(prompt, LONG, tools=[tool], detector=detector)
        for prompt, detector in zip(prompts, detectors, strict=True)
    ]
    for stream in streams:
        assert any(isinstance(event, Intercepted) for event in stream)
    yield streams
    go.set()


@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("mode", ["recompute", "keep", "abort"])
def test_a_running_request_goes_on_as_the_mode_says(mode: Any, depth: int) -> None:
    with LLM(tiny_setup(pipeline_depth=depth)) as llm:
        _, other = weights_of(llm)
        with closed_gate(llm, after=10) as gate:
            stream = llm.stream({"prompt_token_ids": PROMPT}, LONG)
            before = [next(token for token in stream if isinstance(token, Token)).token_id for _ in range(10)]
            assert llm.update_weights(other, mode=mode) == llm.weights_version == 1
            gate.open()
            list(stream)
        tokens = output_of(stream).token_ids
        llm.engine.check_pages()
        assert tokens[:10] == before
        if mode == "abort":
            assert output_of(stream).finish_reason == "abort"
            assert len(tokens) < 60
            return
        assert len(tokens) == 60
        versions = {n: alone(llm, PROMPT + tokens[:n], 60 - n) == tokens[n:] for n in range(10, 15)}
        assert any(versions.values()) == (mode == "recompute")
        assert llm.generate({"prompt_token_ids": PROMPT}, LONG)[0].outputs[0].token_ids != tokens


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_paused_requests_outlive_an_update(mode: Any) -> None:
    with LLM(tiny_setup(policy="swap", kv_tokens=256)) as llm:
        old, other = weights_of(llm)
        with paused(llm, 3) as streams:
            llm.update_weights(other, mode=mode)
            preemptions = llm.counters.preemptions
            llm.engine.check_pages()
        for stream in streams:
            list(stream)
        assert preemptions == 0
        fresh = []
        for index, stream in enumerate(streams):
            tokens = output_of(stream).token_ids
            assert len(tokens) == 63
            fresh.append(alone(llm, [*PROMPT, index, *tokens[:9]], 54) == tokens[9:])
        assert all(fresh) == (mode == "recompute")
        llm.update_weights(old)
        assert llm.weights_version == 2


def test_a_group_shares_its_prompt_again() -> None:
    with LLM(tiny_setup()) as llm:
        _, other = weights_of(llm)
        params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
        with closed_gate(llm, after=12) as gate:
            stream = llm.stream({"prompt_token_ids": list(range(40))}, params)
            for _ in range(48):
                next(stream)
            before = llm.counters.recomputed
            llm.update_weights(other, mode="recompute")
            gate.open()
            list(stream)
        recomputed = llm.counters.recomputed - before
        assert 40 <= recomputed < 2 * 40 + 4 * 30  # not four prompts and what they wrote


def test_new_requests_share_no_page_of_older_weights() -> None:
    with LLM(tiny_setup()) as llm:
        _, other = weights_of(llm)
        with closed_gate(llm, after=10) as gate:
            stream = llm.stream({"prompt_token_ids": PROMPT}, LONG)
            for _ in range(10):
                next(stream)
            llm.update_weights(other, mode="keep")
            [new] = llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(temperature=0.0, max_tokens=4))
            [again] = llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(temperature=0.0, max_tokens=4))
            gate.open()
            list(stream)
        assert new.num_cached_tokens == 0
        assert again.num_cached_tokens > 0


@pytest.mark.parametrize("level", [pytest.param(0, marks=pytest.mark.slow), 1, 2])
def test_a_sleep_changes_no_token_and_compiles_nothing(level: int) -> None:
    with LLM(tiny_setup(policy="swap", lazy=False)) as llm:
        _, other = weights_of(llm)
        expected = alone(llm, PROMPT, 60)
        llm.update_weights(other)
        llm.update_weights(weights_of(llm)[1])
        compilations = CompileCounter()
        with paused(llm, 2) as streams:
            running = llm.stream({"prompt_token_ids": PROMPT}, LONG)
            for _ in range(5):
                next(running)
            llm.sleep(level)
            llm.sleep(level)
            assert llm.is_sleeping
            runner = llm.engine.setup.runner
            assert bool(runner.kv.layers) == (level == 0)
            assert bool(runner.params.embed) == (level < 2)
            new = llm.stream({"prompt_token_ids": PROMPT}, LONG)
            llm.engine.check_pages()
            llm.wake()
        llm.wake()
        for stream in (running, new, *streams):
            list(stream)
        compilations.close()
        assert compilations.count == 0
        for stream in (running, new):
            assert output_of(stream).token_ids == expected
        for index, stream in enumerate(streams):
            tokens = output_of(stream).token_ids
            assert alone(llm, [*PROMPT, index, *tokens[:9]], 54) == tokens[9:]


def test_weights_that_were_discarded_come_with_the_wake(caplog: pytest.LogCaptureFixture) -> None:
    with LLM(tiny_setup()) as llm:
        old, other = weights_of(llm)
        expected = alone(llm, PROMPT, 8)
        unclear: list[Any] = ["x", 1, None]
        for discard in unclear:
            with pytest.raises(ConfigError, match="discard has the wrong type; got "):
                llm.sleep(2, discard=discard)
        llm.sleep(2, discard=True)
        with pytest.raises(RequestError, match="no weights to wake with"):
            llm.wake()
        with pytest.raises(ModelError):
            llm.wake(other._replace(layers=other.layers[:1]))
        assert llm.is_sleeping
        llm.wake(other)
        assert alone(llm, PROMPT, 8) != expected
        llm.sleep(2)
        assert llm.update_weights(old) == 2
        llm.wake()
        assert alone(llm, PROMPT, 8) == expected
        llm.sleep()
        with pytest.raises(RequestError, match="a sleeping LLM"):
            llm.restart()
        for no_level in (3, True, 1.0):
            with pytest.raises(ConfigError, match="no such level"):
                llm.sleep(no_level)  # pyright: ignore[reportArgumentType]
        streams = [llm.stream({"prompt_token_ids": PROMPT}, LONG) for _ in range(2)]
        llm.engine.check_pages()  # between two steps
        llm.wake()
        assert [len(output_of(stream).token_ids) for stream in streams if list(stream)] == [60, 60]
        assert caplog.text.count("waits: the LLM sleeps until wake()") == 1


def test_an_update_writes_into_the_memory_of_the_weights_before() -> None:
    with LLM(tiny_setup("llama_tied")) as llm:
        old, other = weights_of(llm)
        new = jax.device_put(other)
        llm.update_weights(old)
        llm.update_weights(new)
        places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(llm.params)]
        number = len(jax.live_arrays())
        compilations = CompileCounter()
        for mode in (None, "keep"):
            llm.update_weights(new, mode=mode)
            leaves = jax.tree.leaves(llm.params)
            assert [leaf.unsafe_buffer_pointer() for leaf in leaves] == places
        compilations.close()
        assert len(jax.live_arrays()) == number
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))


NAME = "model.layers.{}.self_attn.q_proj.weight"
TENSORS = load_file(GOLDEN / "llama_gqa" / "model.safetensors")


class Unreadable(np.ndarray):
    """An array that fails when it is used."""

    @property
    def T(self) -> NoReturn:
        raise OSError("the file is gone")


def broken(layer: int) -> dict[str, np.ndarray]:
    """Other weights, one of which cannot be read in the end."""
    name = NAME.format(layer)
    return {key: leaf[..., ::-1].copy() for key, leaf in TENSORS.items()} | {name: TENSORS[name].view(Unreadable)}


def written(llm: LLM) -> list[int]:
    return llm.generate({"prompt_token_ids": PROMPT}, LONG)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_llm() as llm:
        llm.update_weights(TENSORS)
        yield llm


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_requests_wait_for_whole_weights_when_some_were_overwritten(llm: LLM, mode: Any) -> None:
    expected, version = written(llm), llm.weights_version
    with closed_gate(llm, after=10) as gate:
        stream = llm.stream({"prompt_token_ids": PROMPT}, LONG)
        for _ in range(10):
            next(stream)
        with pytest.raises(
            EngineError, match="the file is gone; the weights before are overwritten in part, and the LLM sl"
        ):
            llm.update_weights(broken(1), mode=mode)
        gate.open()
    assert llm.is_sleeping
    assert llm.weights_version == version
    with pytest.raises(RequestError, match="no weights to wake with"):
        llm.wake()
    with pytest.raises(EngineError, match="the LLM sleeps on"):
        llm.wake(broken(0))
    llm.engine.check_pages()
    llm.wake(TENSORS)
    list(stream)
    [output] = stream.outputs.values()
    assert output.outputs[0].token_ids == expected == written(llm)
    assert llm.weights_version == version + 1


def test_nothing_is_changed_where_nothing_was_overwritten(llm: LLM) -> None:
    expected, version = written(llm), llm.weights_version
    for mode in (None, "keep"):
        with pytest.raises(EngineError, match="the weights before are served on"):
            llm.update_weights(broken(0), only="model.layers.", mode=mode)
        assert not llm.is_sleeping
        assert written(llm) == expected
    llm.sleep(2)
    with pytest.raises(EngineError, match="the weights before are kept"):
        llm.update_weights(broken(1), mode="keep")
    with pytest.raises(EngineError, match="the LLM sleeps on"):
        llm.wake(broken(1))
    llm.wake()
    assert written(llm) == expected
    assert llm.weights_version == version
    llm.engine.check_pages()


@pytest.mark.slow
def test_the_callers_own_weights_are_whole_after_a_first_update_that_fails() -> None:
    loaded = load(GOLDEN / "llama_gqa", dtype="float32")
    with LLM(loaded.model, params=loaded.params, max_num_seqs=2, profile="paper-gptj-6b-a100", lazy=True) as llm:
        expected = written(llm)
        with pytest.raises(EngineError, match="the weights before are served on"):
            llm.update_weights(broken(1))
        assert written(llm) == expected
        llm.update_weights(TENSORS)
        assert written(llm) == expected
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(loaded.params))
