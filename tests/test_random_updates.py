"""Random changes of weights, sleeps, pauses and aborts while requests run.

The weights that come are those that serve, in other forms, so that every output has the tokens and the log probabilities that
its request has when nothing happens meanwhile. Some updates fail in the middle, and the next weights come with `wake`.

`MIXES_SECONDS` is for how long each model goes on, `MIXES_SEED` its first mix.
"""

import os
import threading
import time
from collections import Counter
from random import Random
from typing import Any, NoReturn

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jinfercept.calls import Call, Tool
from jinfercept.engine.streaming import Stream
from jinfercept.errors import EngineError
from jinfercept.intercept.detector import ScriptedDetector
from jinfercept.llm import LLM
from jinfercept.models.joined_weights import separate
from jinfercept.models.model import untied
from jinfercept.models.protocol import Params
from jinfercept.outputs import CompletionOutput
from jinfercept.sampling_params import SamplingParams
from jinfercept.startup.weights import UpdateMode
from tests.support.fake_engine import POLICIES
from tests.support.tiny_model import GOLDEN, tiny_llm

MODELS = ("llama_gqa", "gptj", "gemma3", "qwen3_next", "qwen3_moe")
"""Plain layers, parallel blocks, a pool of windows, states, experts."""
SMALL: Any = {"kv_tokens": 192, "max_model_len": 128, "swap_space": 0.001}
CHANGES = (
    "keep",
    "recompute",
    "a part",
    "by name",
    "a failure",
    "pause",
    "sleep 1",
    "sleep 2",
    "discard",
    "abort",
    "nothing",
)
WITHIN = 1e-3
"""Most that a log probability differs."""


class Unreadable(np.ndarray):
    """A weight that fails when its layer is written."""

    @property
    def T(self) -> NoReturn:
        raise OSError("not there any more")


class Changes:
    """What happens to one engine, and how often each has happened."""

    def __init__(self, name: str, llm: LLM) -> None:
        whole = untied(llm.model.config, separate(llm.params))  # pyright: ignore[reportArgumentType]
        self.llm, self.params = llm, Params(*jax.tree.map(np.array, whole))
        self.tensors = {
            key: leaf for file in sorted((GOLDEN / name).glob("*.safetensors")) for key, leaf in load_file(file).items()
        }
        last = max(key for key in self.tensors if key.endswith(("q_proj.weight", "qkvz.weight")))
        self.broken = self.tensors | {last: self.tensors[last].view(Unreadable)}
        self.counts = Counter[str](dict.fromkeys(CHANGES, 0))

    def make(self, rng: Random, streams: list[Stream]) -> None:
        """One of them."""
        modes: list[UpdateMode] = ["keep", "recompute"]
        name, llm, mode = rng.choice(CHANGES), self.llm, rng.choice(modes)
        self.counts[name] += 1
        match name:
            case "keep" | "recompute":
                llm.update_weights(self.params, mode=name)
            case "a part":
                llm.update_weights(self.params, only=f"layers.{rng.randrange(2)}.", mode=mode)
            case "by name":
                llm.update_weights(self.tensors, mode=mode)
            case "a failure":
                with pytest.raises(EngineError):
                    llm.update_weights(self.broken, mode=mode)
                if llm.is_sleeping:
                    llm.wake(self.params)
            case "pause" | "sleep 1" | "sleep 2":
                level = ("pause", "sleep 1", "sleep 2").index(name)
                llm.sleep(level)
                if rng.random() < 0.3:
                    llm.update_weights(self.params, mode=mode)
                if rng.random() < 0.2:
                    llm.sleep(rng.randrange(3))
                llm.wake()
            case "discard":
                llm.sleep(2, discard=True)
                llm.wake(self.params)
            case "abort":
                if rng.random() < 0.1:
                    rng.choice(streams).abort()
        llm.engine.check_pages()


def run(changes: Changes, seed: int) -> None:
    """Some requests, first alone and then amid changes."""
    rng, llm = Random(seed), changes.llm
    llm.restart(policy=rng.choice([*POLICIES]), pipeline_depth=rng.randrange(2))
    size = llm.model.config.vocab_size
    shared = [rng.randrange(3, size) for _ in range(24)]
    count = rng.randrange(2, 7)
    prompts = [
        {
            "prompt_token_ids": shared[: rng.choice([0, 8, 24])]
            + [rng.randrange(3, size) for _ in range(rng.randrange(1, 20))]
        }
        for _ in range(count)
    ]
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 1.0]), seed=place, max_tokens=rng.randrange(5, 40), ignore_eos=True, logprobs=0
        )
        for place in range(count)
    ]
    scripts = [
        {rng.randrange(1, 6): [Call("wait", f"{rng.randrange(6)}")], rng.randrange(8, 15): [Call("wait", "3")]}
        for _ in prompts
    ]
    tool = Tool(
        lambda argument: (time.sleep(0.001 * int(argument)), [5 + int(argument)] * int(argument))[1], name="wait"
    )
    detectors = [ScriptedDetector(script) for script in scripts]
    expected = [output.outputs[0] for output in llm.generate(prompts, params, tools=[tool], detector=detectors)]
    streams = [
        llm.stream(prompt, own, tools=[tool], detector=detector)
        for prompt, own, detector in zip(prompts, params, detectors, strict=True)
    ]
    threads = [threading.Thread(target=list, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        changes.make(rng, streams)
    for stream, alone in zip(streams, expected, strict=True):
        [output] = stream.outputs.values()
        compare(output.outputs[0], alone)
    changes.counts["outputs"] += count


def compare(ours: CompletionOutput, alone: CompletionOutput) -> None:
    """The same tokens, as far as an aborted one goes, with the same log probabilities."""
    number = len(ours.token_ids)
    assert ours.finish_reason == "abort" or number == len(alone.token_ids)
    assert ours.token_ids == alone.token_ids[:number]
    values = [
        [next(iter(named.values())).logprob if named else 0.0 for named in (output.logprobs or ())[:number]]
        for output in (ours, alone)
    ]
    assert values[0] == pytest.approx(values[1], abs=WITHIN)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", MODELS)
def test_no_change_of_the_same_weights_changes_an_output(name: str) -> None:
    seed, seconds = int(os.environ.get("MIXES_SEED", "1")), float(os.environ.get("MIXES_SECONDS", "20"))
    with tiny_llm(name, **SMALL) as llm:
        changes = Changes(name, llm)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                run(changes, seed)
            except AssertionError as error:
                error.add_note(f"mix {seed} of {name}, {llm}")
                raise
            seed += 1
        print(f"{name}, mixes before {seed}: {dict(changes.counts)}")
        assert seconds < 20 or all(changes.counts.values())
