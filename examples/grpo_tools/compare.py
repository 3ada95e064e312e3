"""`compare`: rollouts per second with calls as interceptions, and in loops that drop contexts at every call.

All sample the same questions. `one by one` runs the tools of a round of a batch in turn, `together` each
in a thread, and both then begin a new request with the longer prompt, whose pages the engine does not have any more. With
`--transformers`, an interpreter that has torch and transformers does the same with `generate`.
"""

import json
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tyro import conf

from examples.grpo_tools.functions import MARKS, run_tool, split_call
from examples.grpo_tools.questions import MAX_TOKENS, STOPS, Question, questions, reward_of, tools
from examples.tool_adapter.adapter import adapted, read
from jinfercept import LLM, SamplingParams
from jinfercept.cli.options import Maybe
from jinfercept.models.embedded import NAME
from jinfercept.models.joined_weights import separate
from jinfercept.models.load import load


class Measured(NamedTuple):
    """A way of sampling.

    Attributes:
        per_s: rollouts per second.
        reward: mean.
        calls: of all samples together.
    """

    per_s: float
    reward: float
    calls: int


@dataclass(frozen=True)
class Compare:
    """The command."""

    adapter: conf.Positional[Maybe[Path]] = None
    """directory that `train` wrote (default: the model without one, which seldom calls)"""
    prompts: int = 8
    """questions"""
    n: int = 8
    """samples of each"""
    shots: int = 8
    """examples before a question: they make the prompt long"""
    slow_s: float = 0.1
    """seconds that a look-up takes"""
    repeats: int = 3
    """of every way, in turn; the fastest counts"""
    transformers: Maybe[str] = None
    """an interpreter that has torch, transformers and gguf"""

    def run(self) -> int:
        """Measure and print the ratios; returns 0."""
        drawn_questions = questions(7, self.prompts, shots=self.shots)
        loaded = load(NAME, dtype="float32", quantization="none")
        params = separate(loaded.params)
        if self.adapter is not None:
            params = adapted(params, *read(self.adapter))
        sizes: dict[str, Any] = {"quantization": "none", "kv_tokens": 16384, "max_model_len": 512, "dtype": "float32"}
        with LLM(NAME, max_num_seqs=self.prompts * self.n, **sizes) as llm:
            llm.update_weights(params)
            ways: dict[str, Callable[[], Measured]] = {
                "interceptions": lambda: self._intercepted(llm, drawn_questions),
                "one by one": lambda: self._looped(llm, drawn_questions, 1),
                "together": lambda: self._looped(llm, drawn_questions, self.prompts * self.n),
            }
            best = dict[str, Measured]()
            for _ in range(self.repeats):
                for name, way in ways.items():
                    llm.restart(enable_prefix_caching=name == "interceptions")
                    measured = way()
                    print(
                        f"{name:14} {measured.per_s:7.2f} rollouts/s  reward {measured.reward:.3f}  {measured.calls} calls",
                        flush=True,
                    )
                    best[name] = max(best.get(name, measured), measured)
        if self.transformers is not None:
            best["transformers"] = self._peer(drawn_questions)
        first = best["interceptions"].per_s
        for name, measured in best.items():
            print(f"interceptions : {name} = {first / measured.per_s:.2f}")
        return 0

    def _intercepted(self, llm: LLM, drawn_questions: list[Question]) -> Measured:
        began_s = time.perf_counter()
        params = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, stop=STOPS, seed=3)
        prompts = [question.prompt for question in drawn_questions]
        samples = llm.rollout(prompts, params, n=self.n, tools=tools(self.slow_s))
        taken_s = time.perf_counter() - began_s
        rewards = [
            reward_of(
                drawn_questions[sample.prompt], sample.text, [(call.name, call.arguments) for call in sample.calls]
            )
            for sample in samples
        ]
        return Measured(len(samples) / taken_s, float(np.mean(rewards)), sum(len(sample.calls) for sample in samples))

    def _looped(self, llm: LLM, drawn_questions: list[Question], threads: int) -> Measured:
        """Rounds of a batch: generate up to a call or the end, run the tools, and begin again with their results."""
        assert llm.tokenizer is not None
        began_s, encode = time.perf_counter(), llm.tokenizer.encode
        own = [question for question in drawn_questions for _ in range(self.n)]
        ids = [encode(question.prompt) for question in own]
        texts, calls, left = [""] * len(own), [list[tuple[str, str]]() for _ in own], [MAX_TOKENS] * len(own)
        open_places, round_number = list(range(len(own))), 0
        with ThreadPoolExecutor(threads) as pool:
            while open_places:
                params = [
                    SamplingParams(
                        temperature=1.0,
                        max_tokens=left[place],
                        stop=("=", *STOPS),
                        include_stop_str_in_output=True,
                        seed=1000 * round_number + place,
                    )
                    for place in open_places
                ]
                outputs = llm.generate([{"prompt_token_ids": ids[place]} for place in open_places], params)
                run = list[tuple[int, str, str]]()
                for place, output in zip(open_places, outputs, strict=True):
                    [completion] = output.outputs
                    ids[place] = [*ids[place], *completion.token_ids]
                    left[place] -= len(completion.token_ids)
                    texts[place] += completion.text
                    if completion.stop_reason == "=" and (call := split_call(texts[place])) and left[place] > 0:
                        run.append((place, *call))
                results = list(pool.map(lambda item: run_tool(item[1], item[2], self.slow_s), run))
                for (place, name, arguments), result in zip(run, results, strict=True):
                    calls[place].append((name, arguments))
                    texts[place] += result + MARKS[name][1]
                    ids[place] = [*ids[place], *encode(result + MARKS[name][1])]
                open_places, round_number = [place for place, *_ in run], round_number + 1
        taken_s = time.perf_counter() - began_s
        rewards = [reward_of(*each) for each in zip(own, texts, calls, strict=True)]
        return Measured(len(own) / taken_s, float(np.mean(rewards)), sum(map(len, calls)))

    def _peer(self, drawn_questions: list[Question]) -> Measured:
        """Transformers' `generate` in another interpreter, with the same rounds."""
        work = {
            "model": str(load(NAME, dtype="float32").source),
            "adapter": None if self.adapter is None else str(self.adapter),
            "prompts": [question.prompt for question in drawn_questions for _ in range(self.n)],
            "max_tokens": MAX_TOKENS,
            "stops": STOPS,
            "slow_s": self.slow_s,
            "repeats": self.repeats,
        }
        script = Path(__file__).with_name("transformers_loop.py")
        done = subprocess.run(
            [self.transformers or "", script], input=json.dumps(work), text=True, capture_output=True, check=True
        )
        answer = json.loads(done.stdout.splitlines()[-1])
        own = [question for question in drawn_questions for _ in range(self.n)]
        rewards = [
            reward_of(question, text, [tuple(call) for call in calls])
            for question, text, calls in zip(own, answer["texts"], answer["calls"], strict=True)
        ]
        measured = Measured(len(own) / answer["seconds"], float(np.mean(rewards)), sum(map(len, answer["calls"])))
        print(
            f"{'transformers':14} {measured.per_s:7.2f} rollouts/s  reward {measured.reward:.3f}  {measured.calls} calls",
            flush=True,
        )
        return measured
