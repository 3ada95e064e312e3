"""`python -m examples.tool_adapter score PACKAGE`: a model's calls of functions that it has never seen (`bfcl.py`).

Cases are served together, each as the server serves a request with tools and `tool_choice: "auto"`: the tools stand in the
prompt, and a grammar lets the model answer or call; or without that grammar. Held-out cases are dialogues about skills that no
lesson has, with one right answer each.
"""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from scipy.stats import binomtest
from tyro import conf

from examples.tool_adapter.bfcl import Case, is_right, read_cases
from examples.tool_adapter.dialogues import HELD_OUT, lessons
from jinfercept import LLM, SamplingParams
from jinfercept.chat.template import ChatTemplate
from jinfercept.cli.options import Maybe
from jinfercept.config import LLMOptions
from jinfercept.models.embedded import NAME

_PARAMS = SamplingParams(temperature=0.0, max_tokens=160)


def held_out_cases() -> Iterator[Case]:
    """Single calls, and questions that no tool answers."""
    dialogues = (dialogue for lesson in lessons(HELD_OUT) for dialogue in lesson)
    for number, (tools, (*messages, answer)) in enumerate(dialogues):
        functions = [tool["function"] for tool in tools]
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
    """of 100 cases about skills that no lesson has"""
    grammar: bool = True
    """calls are made of the grammar of their functions"""
    bias: Maybe[float] = None
    """the option `tool_call_bias`; by default that of the adapter that the model has, and none for another"""
    at_once: int = 64
    """cases that are served together"""
    seed: int = 0
    """of the choice of cases"""

    def run(self) -> int:
        """Print a row for every category; returns 0."""
        options: LLMOptions = {"max_model_len": 4096, "max_num_seqs": self.at_once}
        if self.adapter is not None:
            options |= {"loras": {_NAME: str(self.adapter)}, "tool_lora": _NAME}
        elif self.base:
            options |= {"tool_lora": ""}
        if self.bias is not None:
            options |= {"tool_call_bias": self.bias}
        counts = {"simple_python": self.simple, "multiple": self.multiple, "irrelevance": self.irrelevance}
        cases = {name: read_cases(self.package, name, count, self.seed) for name, count in counts.items()}
        cases["held out"] = list(islice(held_out_cases(), self.held_out))
        with LLM(self.model, **options) as llm:
            for category in filter(cases.get, cases):
                self._category(llm, category, cases[category])
        return 0

    def _category(self, llm: LLM, category: str, cases: list[Case]) -> None:
        began_s = time.monotonic()
        calls = asyncio.run(self._served(llm, cases))
        right = sum(map(is_right, cases, calls))
        low, high = binomtest(right, len(cases)).proportion_ci(method="wilson")
        print(
            f"{category:14} {right:4} of {len(cases):4}  {100 * right / len(cases):5.1f} %  "
            f"[{100 * low:.0f}, {100 * high:.0f}]  {time.monotonic() - began_s:.0f} s",
            flush=True,
        )

    async def _served(self, llm: LLM, cases: list[Case]) -> list[list[tuple[str, Any]]]:
        room = asyncio.Semaphore(self.at_once)

        async def served(case: Case) -> list[tuple[str, Any]]:
            async with room:
                return await (self._chat(llm, case) if self.grammar else self._completion(llm, case))

        return await asyncio.gather(*map(served, cases))

    async def _chat(self, llm: LLM, case: Case) -> list[tuple[str, Any]]:
        (output,) = await llm.achat(case.messages, _PARAMS, tools=case.tools, tool_choice="auto")
        made = [call["function"] for message in output.outputs[0].messages for call in message.get("tool_calls") or ()]
        return [(function["name"], _parsed(function["arguments"])) for function in made]

    async def _completion(self, llm: LLM, case: Case) -> list[tuple[str, Any]]:
        assert llm.tokenizer is not None
        template = ChatTemplate(llm.tokenizer, (), None, {}, llm.model.config.eos_token_ids, written_tools=case.tools)
        prompt = template.encode(template.render(case.messages))
        (output,) = await llm.agenerate([{"prompt_token_ids": prompt}], _PARAMS, lora=llm.config.adapters.tool_lora)
        calls = [_parsed(text) for text in _CALL.findall(output.outputs[0].text)]
        return [
            (call.get("name", ""), call.get("arguments")) if isinstance(call, dict) else ("", None) for call in calls
        ]


def _parsed(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return None
