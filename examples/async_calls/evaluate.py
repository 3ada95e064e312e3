"""`evaluate`: a trained model on held-out dialogues, its calls asynchronous or, where the prompt says so, synchronous."""

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple, get_args

from rich.console import Console
from rich.table import Table
from tyro import conf

from examples.async_calls.dialogues import IDS, LOOKUPS, MAX_QUESTIONS, TOTAL, Dialogue, Mode, answer, dialogues, prompt
from jinfercept import LLM, SamplingParams, Tool
from jinfercept.chat.parsers.cml import CMLParser
from jinfercept.errors import ConfigError
from jinfercept.hooks import BadFrame
from jinfercept.outputs import CompletionOutput, RequestOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=512)
FIRST_LINE = f"\n- {IDS[0]}: "
"""Begins every answer."""


class Outcome(NamedTuple):
    """What became of one dialogue.

    Attributes:
        well_formed: the text ends by itself, and all of its markup is sound: every call is one of a tool that exists.
        answer: the lines behind the last frame.
        right: whether that is what the tools return to the right calls.
        seconds: from the prompt to the end.
    """

    well_formed: bool
    answer: str
    right: bool
    seconds: float


@dataclass(frozen=True)
class Evaluate:
    """The command."""

    model: conf.Positional[str]
    """a directory that `train` wrote"""
    dialogues: int = 100
    """held-out dialogues, of the test split: `train` shows scores of the validation split"""
    seed: int = 0
    """of the dialogues"""
    fastest_s: float = 0.03
    """least seconds that a call takes"""
    slowest_s: float = 0.5
    """most seconds that a call takes"""
    concurrency: int = 1
    """dialogues at a time"""

    def run(self) -> int:
        """Print a table of both modes; returns 0.

        Raises:
            ConfigError: there is nothing to do.
            ModelError: the model cannot be loaded.
        """
        if self.dialogues < 1 or self.concurrency < 1 or not 0 <= self.fastest_s <= self.slowest_s:
            raise ConfigError(
                "dialogues and concurrency are from 1, and the fastest call is no slower than the slowest",
                got=self,
                fix="--dialogues 100",
            )
        held_out = list(islice(dialogues(self.seed, "test"), self.dialogues))
        with LLM(self.model, dtype="float32", max_num_seqs=max(2, self.concurrency), max_num_batched_tokens=64) as llm:
            outcomes = {mode: self._serve(llm, held_out, mode) for mode in get_args(Mode)}
        Console().print(table(outcomes))
        return 0

    def _serve(self, llm: LLM, held_out: Sequence[Dialogue], mode: Mode) -> list[Outcome]:
        """All dialogues in one mode."""

        def run_dialogue(number: int) -> Outcome:
            rng = random.Random(number)
            waits_s = [rng.uniform(self.fastest_s, self.slowest_s) for _ in held_out[number].questions]
            return outcome(llm, held_out[number], generate(llm, held_out[number], mode, waits_s))

        run_dialogue(0)  # imports what declares tools
        with ThreadPoolExecutor(self.concurrency) as threads:
            return list(threads.map(run_dialogue, range(len(held_out))))


def generate(
    llm: LLM, dialogue: Dialogue, mode: Mode, waits_s: Sequence[float], params: SamplingParams = GREEDY
) -> RequestOutput:
    """The model's part of one dialogue; the call of each question takes its seconds."""
    [output] = llm.generate(prompt(dialogue.questions, mode), params, tools=tools(dialogue, waits_s))
    return output


def tools(dialogue: Dialogue, waits_s: Sequence[float]) -> list[Tool]:
    """The tools of one dialogue, which return its values after some seconds."""
    answers = dict[tuple[str | int, ...], tuple[int, float]]()
    for question, value, wait_s in zip(*dialogue, waits_s, strict=True):
        arguments = (question.item,) if question.item else question.terms
        if question.dependent:
            arguments = tuple(
                dialogue.values[place] if place in question.terms else 0 for place in range(MAX_QUESTIONS)
            )
        answers[question.tool, *arguments] = value, wait_s

    def returned(*call: str | int) -> int:
        value, wait_s = answers[call]
        time.sleep(wait_s)
        return value

    def add(first: int, second: int) -> int:
        """The sum of two numbers."""
        return returned("add", first, second)

    def total(p: int = 0, q: int = 0, r: int = 0, s: int = 0) -> int:
        """The total of answers, which have the ids of their questions."""
        return returned(TOTAL, p, q, r, s)

    def lookup(name: str) -> Tool:
        def look(item: str) -> int:
            """Looks something up about an item."""
            return returned(name, item)

        return Tool(look, name=name, calls="async")

    return [Tool(add, calls="async"), Tool(total, calls="async"), *map(lookup, LOOKUPS)]


def outcome(llm: LLM, dialogue: Dialogue, output: RequestOutput) -> Outcome:
    """What became of a dialogue."""
    completion, parser = output.outputs[0], CMLParser()
    assert llm.tokenizer is not None
    texts = [llm.tokenizer.decode(ids, skip_special_tokens=False) for ids in written(completion)]
    bad = [frame for text in texts for frame in parser.feed(text) if isinstance(frame, BadFrame)]
    refused = [interrupt for interrupt in completion.interrupts if not interrupt.call.name]
    end = llm.tokenizer.token_text(completion.token_ids[-1])
    answered = FIRST_LINE + texts[-1].removesuffix(end).rpartition(FIRST_LINE)[2]
    sound = parser.clean and not bad and not refused and completion.finish_reason == "stop"
    seconds = output.metrics.finished_s - output.metrics.arrival_s
    return Outcome(sound, answered, answered == answer(dialogue), seconds)


def written(completion: CompletionOutput) -> Iterator[list[int]]:
    """The tokens that the model wrote, divided by the interrupts."""
    ends = [0, *(end for interrupt in completion.interrupts for end in interrupt.span), len(completion.token_ids)]
    return (completion.token_ids[start:stop] for start, stop in list(pairwise(ends))[::2])


def table(outcomes: dict[Mode, list[Outcome]]) -> Table:
    """Shares and times by mode, and what asynchronous calls gain."""
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("calls", "dialogues", "well-formed", "right", "same answers", "seconds each", "faster"):
        shown.add_column(name, justify="left" if name == "calls" else "right")
    synchronous = outcomes["sync"]
    baseline_s = sum(outcome.seconds for outcome in synchronous)
    for mode, some in outcomes.items():
        same = sum(outcome.answer == other.answer for outcome, other in zip(some, synchronous, strict=True))
        total_s = sum(outcome.seconds for outcome in some)
        shares = (sum(outcome.well_formed for outcome in some), sum(outcome.right for outcome in some), same)
        cells = [f"{share / len(some):.1%}" for share in shares]
        shown.add_row(mode, str(len(some)), *cells, f"{total_s / len(some):.2f}", f"{baseline_s / total_s:.2f} ×")
    return shown
