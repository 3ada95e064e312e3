"""`python -m examples.tool_adapter score PACKAGE`: a model's calls of functions that it has never seen (`bfcl.py`).

Cases are served together, each as the server serves a request with tools and `tool_choice: "auto"`: the tools stand in the
prompt, and a grammar lets the model answer or call; or without that grammar. Cases of the generator's own are questions about
skills that no training dialogue has, with one right answer each.
"""

import asyncio
import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tyro import conf

from examples.tool_adapter.bfcl import Case, mistakes, read_cases
from examples.tool_adapter.dialogues import Dialogue, Mix, lessons
from examples.tool_adapter.lexicon import Lexicon
from examples.tool_adapter.packing import lexicon
from jinfercept import LLM, SamplingParams
from jinfercept.chat.template import ChatTemplate
from jinfercept.cli.options import Maybe
from jinfercept.config import LLMOptions
from jinfercept.models.embedded import NAME

_MIX = Mix(several=0, incomplete=0, continued=0)


def held_out_cases(lexicon: Lexicon, count: int, seed: int) -> list[Case]:
    """Single calls, and questions that no tool answers."""
    made = (
        dialogue
        for lesson in lessons(lexicon, seed, examination=True, num_dialogues=2, mix=_MIX)
        for dialogue in lesson
    )
    return list(islice(_cases(made), count))


def _cases(dialogues: Iterator[Dialogue]) -> Iterator[Case]:
    for number, dialogue in enumerate(dialogues):
        *messages, answer = dialogue.messages
        functions = [tool["function"] for tool in dialogue.tools]
        yield Case(f"held_out_{number}", messages, functions, _answer(answer))


def _answer(message: dict[str, Any]) -> dict[str, dict[str, list[Any]]] | None:
    if not message.get("tool_calls"):
        return None
    ((function),) = (call["function"] for call in message["tool_calls"])
    arguments = json.loads(function["arguments"])
    return {function["name"]: {name: [_possible(value)] for name, value in arguments.items()}}


def _possible(value: Any) -> Any:
    """Of a record every field has a list of possible values."""
    return {name: [item] for name, item in value.items()} if isinstance(value, dict) else value


_NAME = "tools"
"""Of the adapter, among those that are served."""
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)


@dataclass(frozen=True)
class Score:
    """The command."""

    package: conf.Positional[Path]
    """wheel or directory of `bfcl-eval`"""
    adapter: Maybe[Path] = None
    """a directory that `train` wrote, instead of the adapter that the model has"""
    base: bool = False
    """without any adapter"""
    model: str = NAME
    """to be examined"""
    simple: int = 100
    """cases of one function"""
    multiple: int = 60
    """cases of several functions, of which one fits"""
    irrelevance: int = 60
    """cases of which no function fits"""
    held_out: int = 0
    """cases of the generator's own, about skills that were not learnt"""
    grammar: bool = True
    """calls are made of the grammar of their functions"""
    bias: Maybe[float] = None
    """the option `tool_call_bias`; by default that of the adapter that the model has, and none for another"""
    tool_choice: Literal["auto", "required"] = "auto"
    """whether the model may answer or must call"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """of weights and activations"""
    max_tokens: int = 160
    """of a turn"""
    at_once: int = 64
    """cases that are served together"""
    seed: int = 0
    """of the choice of cases"""
    shown: int = 0
    """mistakes of every category that are printed"""

    def run(self) -> int:
        """Print a row for every category; returns 0."""
        options: LLMOptions = {"dtype": self.dtype, "max_model_len": 4096, "max_num_seqs": self.at_once}
        if self.adapter is not None:
            options |= {"loras": {_NAME: str(self.adapter)}, "tool_lora": _NAME}
        elif self.base:
            options |= {"tool_lora": ""}
        if self.bias is not None:
            options |= {"tool_call_bias": self.bias}
        with LLM(self.model, **options) as llm:
            counts = {"simple_python": self.simple, "multiple": self.multiple, "irrelevance": self.irrelevance}
            for category, count in counts.items():
                if count:
                    self._category(llm, category, read_cases(self.package, category, count, self.seed))
            if self.held_out:
                assert llm.tokenizer is not None
                self._category(llm, "held out", held_out_cases(lexicon(llm.tokenizer), self.held_out, self.seed))
        return 0

    def _category(self, llm: LLM, category: str, cases: list[Case]) -> None:
        began_s = time.monotonic()
        calls = asyncio.run(self._served(llm, cases))
        wrong = [(case, made, list(mistakes(case, made))) for case, made in zip(cases, calls, strict=True)]
        right = sum(not faults for _, _, faults in wrong)
        low, high = interval(right, len(cases))
        kinds = Counter(_kind(faults[0]) for _, _, faults in wrong if faults)
        print(
            f"{category:14} {right:4} of {len(cases):4}  {100 * right / len(cases):5.1f} %  "
            f"[{100 * low:.0f}, {100 * high:.0f}]  {time.monotonic() - began_s:.0f} s  {dict(kinds.most_common(6))}",
            flush=True,
        )
        for case, made, faults in [entry for entry in wrong if entry[2]][: self.shown]:
            print(f"    {case.name}: {case.messages[-1]['content']!r:.200}\n      {made!r:.300}\n      {faults!r:.200}")

    async def _served(self, llm: LLM, cases: list[Case]) -> list[list[tuple[str, Any]]]:
        room = asyncio.Semaphore(self.at_once)

        async def served(case: Case) -> list[tuple[str, Any]]:
            async with room:
                return await (self._chat(llm, case) if self.grammar else self._completion(llm, case))

        return await asyncio.gather(*map(served, cases))

    async def _chat(self, llm: LLM, case: Case) -> list[tuple[str, Any]]:
        params = SamplingParams(temperature=0.0, max_tokens=self.max_tokens)
        (output,) = await llm.achat(case.messages, params, tools=case.tools, tool_choice=self.tool_choice)
        made = [call["function"] for message in output.outputs[0].messages for call in message.get("tool_calls") or ()]
        return [(function["name"], _parsed(function["arguments"])) for function in made]

    async def _completion(self, llm: LLM, case: Case) -> list[tuple[str, Any]]:
        assert llm.tokenizer is not None
        template = ChatTemplate(llm.tokenizer, (), None, {}, llm.model.config.eos_token_ids, written_tools=case.tools)
        prompt = template.encode(template.render(case.messages))
        params = SamplingParams(temperature=0.0, max_tokens=self.max_tokens)
        (output,) = await llm.agenerate([{"prompt_token_ids": prompt}], params, lora=llm.config.adapters.tool_lora)
        calls = [_parsed(text) for text in _CALL.findall(output.outputs[0].text)]
        return [
            (call.get("name", ""), call.get("arguments")) if isinstance(call, dict) else ("", None) for call in calls
        ]


def _kind(mistake: str) -> str:
    """Of a mistake."""
    if " = " in mistake:
        return "value"
    first = mistake.split()[0]
    return {"function": "other function", "without": "parameter left out", "unknown": "parameter too much"}.get(
        first, mistake
    )


def _parsed(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return None


def interval(right: int, count: int) -> tuple[float, float]:
    """The share's interval of 95 % confidence, Wilson's."""
    z, share = 1.96, right / count
    middle, width = (
        share + z * z / (2 * count),
        z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)),
    )
    return max(0.0, (middle - width) / (1 + z * z / count)), min(1.0, (middle + width) / (1 + z * z / count))
