"""A tiny real model on the real runner, and what its tokens must be."""

import threading
import time
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jinfercept.calls import Call, Tool
from jinfercept.chat.detector import ScriptedDetector
from jinfercept.llm import LLM
from jinfercept.models import joined_weights, model
from jinfercept.models.load import load
from jinfercept.outputs import RequestOutput
from jinfercept.sampling_params import SamplingParams
from jinfercept.start.start import EngineSetup, set_up
from tests.support.dense_model import logits

GOLDEN = Path(__file__).parents[1] / "golden"
LENGTH = 128
TIE = 1e-4
"""Top-two margin of the reference below which a difference is a tie and not a mistake."""

TOOL = Tool(lambda argument: [int(part) for part in argument.split()], name="scripted")


def tiny_setup(name: str = "llama_gqa", **flags: object) -> EngineSetup:
    """A golden checkpoint, loaded, for tests that need its runner. Compiles what steps need, unless `lazy` is false."""
    sizes = {"dtype": "float32", "page_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32}
    flags = sizes | {"profile": "paper-gptj-6b-a100", "lazy": True} | flags
    return set_up(GOLDEN / name, check_pages=True, **flags)  # pyright: ignore[reportArgumentType]


def tiny_llm(name: str = "llama_gqa", **flags: object) -> LLM:
    """A golden checkpoint behind the whole engine."""
    return LLM(tiny_setup(name, **flags))


@cache
def _model(name: str):
    return load(GOLDEN / name, dtype="float32")


@cache
def reference_logits(name: str, tokens: tuple[int, ...]) -> np.ndarray:
    """`[T, V]` logits of the uncached model after every token; cached by tokens."""
    loaded = _model(name)
    padded = jnp.zeros(LENGTH, jnp.int32).at[: len(tokens)].set(jnp.array(tokens))
    return np.asarray(logits(loaded.model, loaded.params, padded))[: len(tokens)]


def count_ties(name: str, output: RequestOutput) -> int:
    """Assert that every generated token is the greedy one of the uncached model on the same stream; returns the ties."""
    completion = output.outputs[0]
    stream, prompt = completion.token_ids, output.prompt_token_ids
    returned = {i for pause in completion.interceptions for i in range(*pause.span)}
    reference = reference_logits(name, tuple(prompt + stream))
    ties = 0
    for index, token in enumerate(stream):
        if index not in returned:
            row = reference[len(prompt) + index - 1]
            assert row.max() - row[token] < TIE, f"token {index} of {output.request_id} is not the greedy one"
            ties += int(token != row.argmax())
    return ties


class Workload:
    """Requests with scripted calls: prompts share prefixes, results differ in length, some tools take a moment."""

    def __init__(self, number: int, seed: int, vocab: int = 128, max_prompt: int = 40) -> None:
        rng = np.random.default_rng(seed)
        shared = rng.integers(0, vocab, max_prompt).tolist()
        self.prompts, self.params, self.detectors = [], [], []
        for _ in range(number):
            length = int(rng.integers(1, max_prompt))
            own = rng.integers(0, vocab, length).tolist()
            common = int(rng.integers(0, length + 1)) if rng.random() < 0.5 else 0
            self.prompts.append({"prompt_token_ids": shared[:common] + own[common:]})
            self.params.append(SamplingParams(temperature=0.0, max_tokens=int(rng.integers(1, 24)), ignore_eos=True))
            script = {}
            for position in rng.integers(1, 20, int(rng.integers(0, 4))).tolist():
                returned = rng.integers(0, vocab, int(rng.choice([0, 1, 3, 9]))).tolist()
                script[position] = [Call("scripted", " ".join(map(str, returned)))]
            self.detectors.append(ScriptedDetector(script))

    def run(self, llm: LLM, delay_s: float = 0.0) -> list[RequestOutput]:
        """Serve all of it at once."""

        def answer(argument: str) -> list[int]:
            time.sleep(delay_s)
            return TOOL.function(argument)  # pyright: ignore[reportReturnType]

        tool = Tool(answer, name="scripted")
        return llm.generate(self.prompts, self.params, tools=[tool], detector=self.detectors)


def streams(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def all_return_at_once(llm: LLM, prompt: int, number: int = 6) -> list[RequestOutput]:
    """Outputs of so many requests, each with two calls that return when those of all others do.

    Args:
        prompt: tokens of each prompt.
    """
    together = threading.Barrier(number, timeout=60)

    def answer(argument: str) -> list[int]:
        together.wait()
        return [3, 1, 4]

    detectors = [ScriptedDetector({position: [Call("wait", "")] for position in (2, 7)}) for _ in range(number)]
    prompts = [{"prompt_token_ids": list(range(index, index + prompt))} for index in range(number)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(prompts, params, tools=[Tool(answer, name="wait")], detector=detectors)
    assert all(len(output.outputs[0].interceptions) == 2 for output in outputs)
    return outputs


def set_joined(monkeypatch: pytest.MonkeyPatch, joined: bool) -> None:
    """As where kernels compute, or as where XLA computes everything on a CPU."""
    for module in (model, joined_weights):
        monkeypatch.setattr(module, "joins", lambda: joined)
