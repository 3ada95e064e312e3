"""`python -m benchmarks hybrid-turns`: prompt tokens that a hybrid model reuses, of those that a Llama of the same pages does.

Tiny checkpoints with random weights play the same conversations: the same lengths, each with the answers of its own. What
counts is how many tokens of each prompt were found, and not computed again. `turns` to `system prompt` are calls of
`LLM.generate` with the whole history; `tool calls` pauses for the results of a tool; the others are a server's protocols. In
`… reasoning dropped` the client returns a short text in place of an answer; in `… evicted` other requests take the device's
pages between two turns, so that the conversation comes back from the host; in `… from disk` the engine starts anew before each
turn, so that it comes back from files.

vLLM and llama.cpp play the conversations in tokens with a Qwen3.5 too, where an interpreter is named that has them
(`--vllm-python`, `--llama-cpp-python`); what their model differs in is in `benchmarks/peers`.
"""

import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
from rich.console import Console

from benchmarks.servers import child_server
from jinfercept.calls import Call, Tool
from jinfercept.chat.detector import ScriptedDetector
from jinfercept.cli.options import Maybe, Switch
from jinfercept.engine.streaming import serve
from jinfercept.errors import ConfigError
from jinfercept.llm import LLM
from jinfercept.request import FollowUp
from jinfercept.sampling_params import SamplingParams
from jinfercept.sim.reports import check_least, check_outputs, plain_table, show, write_json
from studies.plots import check_drawing

CHECKPOINTS = {
    "Llama": "llama_gqa",
    "Qwen3.5": "qwen3_5",
    "Qwen3-Next": "qwen3_next",
    "Gemma 3": "gemma3",
    "gpt-oss": "gpt_oss",
}
HYBRID = "Qwen3.5"
"""The model that peers run."""
PEERS = Path(__file__).with_name("peers")
LENGTH, VOCABULARY = 2048, 128
"""Tokens of the longest sequence; ids of all these checkpoints."""
END = 2
"""The id of the token that ends a turn, with which a system prompt ends too."""
FIRST_ID = 3
"""The first id that is no special token's."""
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "page_size": 16,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "max_model_len": LENGTH,
    "profile": "paper-gptj-6b-a100",
}
TEMPLATE = r"""
{%- for message in messages %}{{ '[' + message.role + '>' }}
{%- if message.role == 'assistant' and not message.content.startswith('Short') %}{{ '*>' }}{% endif %}
{{- message.content + ']' }}{% endfor %}
{%- if add_generation_prompt %}{{ '[assistant>*>' }}{% endif %}"""
"""`*>` stands for what opens an answer's reasoning: a past answer that was returned without it has none."""


class Shape(NamedTuple):
    """Lengths in tokens: of the first prompt, of what each turn adds, of an answer; and the number of turns."""

    first: int = 40
    new: int = 15
    answer: int = 15
    turns: int = 5


class Answered(NamedTuple):
    """A prompt, its answer, and the leading tokens of the prompt that were found."""

    prompt: list[int]
    answer: list[int]
    cached: int


Ask = Callable[[list[int], int], Answered]
"""Answers a prompt with so many tokens, greedily."""


# -- conversations in tokens ---------------------------------------------------------------------------------------


def drawn(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(FIRST_ID, VOCABULARY) for _ in range(number)]


def play_turns(ask: Ask, shape: Shape, rng: random.Random) -> None:
    """Every prompt is the one before, its answer, and new tokens."""
    prompt = drawn(rng, shape.first)
    for _ in range(shape.turns):
        answered = ask(prompt, shape.answer)
        prompt = [*prompt, *answered.answer, *drawn(rng, shape.new)]


def play_dropped(ask: Ask, shape: Shape, rng: random.Random) -> None:
    """The same with a few other tokens in place of each answer."""
    prompt = drawn(rng, shape.first)
    for _ in range(shape.turns):
        ask(prompt, shape.answer)
        prompt = [*prompt, *drawn(rng, 5), *drawn(rng, shape.new)]


def play_forks(ask: Ask, shape: Shape, rng: random.Random) -> None:
    """Every prompt is answered twice, and both answers of the first prompt go on."""
    prompts = [drawn(rng, shape.first)]
    for turn in range(shape.turns):
        for place, prompt in enumerate(prompts):
            first, second = ask(prompt, shape.answer), ask(prompt, shape.answer - 4)
            if not turn:
                prompts = [prompt, prompt]
                prompts[1] = [*prompt, *second.answer, *drawn(rng, shape.new)]
            prompts[place] = [*prompt, *first.answer, *drawn(rng, shape.new)]


def play_edits(ask: Ask, shape: Shape, rng: random.Random) -> None:
    """Some turns; then the new tokens of the second turn are edited and two turns follow, and those of the third turn."""
    prompts, prompt = list[list[int]](), drawn(rng, shape.first)
    for _ in range(shape.turns):
        prompts.append(prompt)
        answered = ask(prompt, shape.answer)
        prompt = [*prompt, *answered.answer, *drawn(rng, shape.new)]
    for place in (1, 2):
        prompt = [*prompts[place][: -shape.new], *drawn(rng, shape.new)]
        for _ in range(2):
            answered = ask(prompt, shape.answer)
            prompt = [*prompt, *answered.answer, *drawn(rng, shape.new)]


def play_system(ask: Ask, shape: Shape, rng: random.Random) -> None:
    """Conversations of two turns behind one system prompt."""
    system = [*drawn(rng, 3 * shape.first), END]
    for _ in range(shape.turns):
        prompt = [*system, *drawn(rng, shape.new)]
        answered = ask(prompt, shape.answer)
        ask([*prompt, *answered.answer, *drawn(rng, shape.new)], shape.answer)


IN_TOKENS: dict[str, Callable[[Ask, Shape, random.Random], None]] = {
    "turns": play_turns,
    "answers dropped": play_dropped,
    "forks": play_forks,
    "edits": play_edits,
    "system prompt": play_system,
}


class Score(NamedTuple):
    """Tokens of the prompts of a scenario, and those of them that were found; requests whose tokens were not those of the
    model without a cache, None where that was not compared."""

    prompt: int
    cached: int
    different: int | None = None


def library(model: Path, shape: Shape, seed: int) -> Iterator[tuple[str, Score]]:
    """The scenarios of a library's caller."""
    with LLM(str(model), kv_tokens=4 * LENGTH, **ENGINE) as llm:
        for name in IN_TOKENS:
            answered = play_in_library(llm, name, shape, seed)
            yield name, Score(_tokens(answered), sum(each.cached for each in answered), num_different(llm, answered))
        llm.restart(enable_prefix_caching=True)
        yield "tool calls", _pauses(llm, shape, random.Random(seed))
    with tempfile.TemporaryDirectory() as folder:
        disk = {"swap_space": 0.05, "kv_disk": folder, "kv_disk_space": 0.1}
        with LLM(str(model), kv_tokens=4 * LENGTH, **disk, **ENGINE) as llm:
            for name in ("turns", "answers dropped"):
                answered = play_in_library(llm, name, shape, seed, from_disk=True)
                yield f"{name}, from disk", Score(_tokens(answered), sum(each.cached for each in answered))


def play_in_library(llm: LLM, name: str, shape: Shape, seed: int, *, from_disk: bool = False) -> list[Answered]:
    """Play one of the conversations in tokens on empty pages; `from_disk`: they are empty before each prompt."""
    llm.restart(enable_prefix_caching=True)
    answered = list[Answered]()

    def ask(prompt: list[int], number: int) -> Answered:
        params = SamplingParams(temperature=0.0, max_tokens=number, ignore_eos=True)
        requests = llm.make_requests([{"prompt_token_ids": prompt}], params, [], None)
        if from_disk:
            llm.restart()
            requests = [replace(request, follow_up=FollowUp()) for request in requests]
        [output] = serve(llm.engine.thread, requests)
        answered.append(Answered(prompt, output.outputs[0].token_ids, output.num_cached_tokens or 0))
        return answered[-1]

    IN_TOKENS[name](ask, shape, random.Random(seed))
    return answered


def _tokens(answered: Sequence[Answered]) -> int:
    return sum(len(each.prompt) for each in answered)


def num_different(llm: LLM, answered: Sequence[Answered]) -> int:
    """Answers that differ from those of an engine that keeps no prefix."""
    llm.restart(enable_prefix_caching=False)
    params = [SamplingParams(temperature=0.0, max_tokens=len(each.answer), ignore_eos=True) for each in answered]
    outputs = [
        llm.generate([{"prompt_token_ids": each.prompt}], sampling)[0]
        for each, sampling in zip(answered, params, strict=True)
    ]
    return sum(output.outputs[0].token_ids != each.answer for output, each in zip(outputs, answered, strict=True))


def _pauses(llm: LLM, shape: Shape, rng: random.Random) -> Score:
    """A request that pauses for a tool in every turn: tokens of the contexts that return, and those of them that were kept."""
    results = " ".join(map(str, drawn(rng, shape.new)))
    script = {(turn + 1) * shape.answer + turn * shape.new: [Call("scripted", results)] for turn in range(shape.turns)}
    tool = Tool(lambda argument: [int(part) for part in argument.split()], name="scripted")
    params = SamplingParams(temperature=0.0, max_tokens=(shape.turns + 1) * shape.answer, ignore_eos=True)
    prompt = {"prompt_token_ids": drawn(rng, shape.first)}
    llm.generate([prompt], params, tools=[tool], detector=ScriptedDetector(script))
    return Score(llm.counters.returned, llm.counters.kept)


def peer(command: Sequence[str], shape: Shape, seed: int) -> Iterator[tuple[str, Score]]:
    """The conversations in tokens on another engine, which reads prompts from its input. Each begins with an empty engine."""
    for name, play in IN_TOKENS.items():
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            answered = list[Answered]()

            def ask(
                prompt: list[int], number: int, process: Any = process, answered: list[Answered] = answered
            ) -> Answered:
                print(json.dumps([prompt, number]), file=process.stdin, flush=True)
                line = process.stdout.readline()
                if not line:
                    raise ConfigError("the peer ended", got=" ".join(command), fix="run it alone to see why")
                answered.append(Answered(prompt, *json.loads(line)))
                return answered[-1]

            play(ask, shape, random.Random(seed))
            assert process.stdin is not None
            process.stdin.close()
        yield name, Score(_tokens(answered), sum(each.cached for each in answered))


# -- conversations over HTTP ---------------------------------------------------------------------------------------


class Protocol(NamedTuple):
    """How a protocol is answered.

    Attributes:
        path: of the endpoint.
        body: of a conversation, and the most tokens of its answer.
        text: of a reply.
        usage: tokens of the prompt, and those that were found, of a reply.
    """

    path: str
    body: Callable[[list[dict[str, str]], int], dict[str, Any]]
    text: Callable[[Any], str]
    usage: Callable[[Any], tuple[int, int]]


PROTOCOLS = {
    "chat": Protocol(
        "/v1/chat/completions",
        lambda messages, most: {"messages": messages, "max_tokens": most},
        lambda reply: reply["choices"][0]["message"]["content"],
        lambda reply: (
            reply["usage"]["prompt_tokens"],
            reply["usage"]["prompt_tokens_details"]["cached_tokens"],
        ),
    ),
    "responses": Protocol(
        "/v1/responses",
        lambda messages, most: {"input": messages, "max_output_tokens": most, "store": False},
        lambda reply: "".join(
            part["text"] for item in reply["output"] if item["type"] == "message" for part in item["content"]
        ),
        lambda reply: (reply["usage"]["input_tokens"], reply["usage"]["input_tokens_details"]["cached_tokens"]),
    ),
    "messages": Protocol(
        "/v1/messages",
        lambda messages, most: {"messages": messages, "max_tokens": most},
        lambda reply: "".join(part["text"] for part in reply["content"] if part["type"] == "text"),
        lambda reply: (
            reply["usage"]["input_tokens"] + reply["usage"]["cache_read_input_tokens"],
            reply["usage"]["cache_read_input_tokens"],
        ),
    ),
}


def served(model: Path, shape: Shape, seed: int) -> Iterator[tuple[str, Score]]:
    """The scenarios of a server's clients."""
    flags = {**ENGINE, "served-model-name": "tiny", "swap_space": 0.05, "kv_tokens": LENGTH}
    with child_server(str(model), flags) as url, httpx2.Client(base_url=url, timeout=120) as client:
        number = 0
        for evicts in (False, True):
            for drops in (False, True):
                for name, protocol in PROTOCOLS.items():
                    number += 1
                    words = [name, *["reasoning dropped"] * drops, *["evicted"] * evicts]
                    rng = random.Random(f"{seed} {number}")
                    turns = HttpClient(client, protocol, "tiny", rng).play(shape, drops=drops, evicts=evicts)
                    yield ", ".join(words), Score(*map(sum, zip(*turns, strict=True)))


class HttpClient:
    """A client of a server, with a conversation."""

    def __init__(self, client: httpx2.Client, protocol: Protocol, model: str, rng: random.Random) -> None:
        self._client, self._protocol, self._model, self._rng = client, protocol, model, rng

    def play(self, shape: Shape, *, drops: bool, evicts: bool) -> list[tuple[int, int]]:
        """Play a conversation; returns the tokens of every prompt, and those of them that were found."""
        messages, turns = [{"role": "user", "content": self._text(shape.first)}], list[tuple[int, int]]()
        for turn in range(shape.turns):
            if turn and evicts:
                for _ in range(3):
                    self._post({"messages": [{"role": "user", "content": self._text(LENGTH // 2)}], "max_tokens": 4})
            body = self._protocol.body(messages, shape.answer)
            reply = self._post(body, self._protocol.path)
            turns.append(self._protocol.usage(reply))
            answer = "Short." if drops else self._protocol.text(reply)
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": self._text(shape.new)},
            ]
        return turns

    def _post(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
        reply = self._client.post(path, json={"model": self._model, "temperature": 0, **body})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def _text(self, number: int) -> str:
        return "".join(self._rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(number))


# -- checkpoints ---------------------------------------------------------------------------------------------------


def write_model(name: str, folder: Path) -> Path:
    """A checkpoint of the tests: a token for each of 125 characters, a long context, no special tokens in its answers."""
    import jax.numpy as jnp
    from safetensors.flax import load_file, save_file
    from tokenizers import Tokenizer, decoders, models

    from tests.support.tiny_model import GOLDEN

    shutil.copytree(GOLDEN / name, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"eos_token_id": END, "max_position_embeddings": LENGTH}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    weights = load_file(folder / "model.safetensors")
    rows = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
    assert weights[rows].shape[0] == VOCABULARY
    head = weights[rows].astype(jnp.float32).at[:FIRST_ID].set(0.0)  # a logit of 0 is never the largest of so many
    save_file({**weights, rows: head.astype(weights[rows].dtype)}, folder / "model.safetensors")
    characters = [*map(chr, range(32, 127)), *map(chr, range(0xE0, 0x100))]
    words = dict.fromkeys(["<unk>", "<s>", "]", *characters])
    ids = {word: number for number, word in enumerate([*words][:VOCABULARY])}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens(["<unk>", "<s>", "]"])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "]", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


# -- the command ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HybridTurns:
    """The command."""

    turns: int = 5
    """of every conversation"""
    first_tokens: int = 40
    """of the first prompt"""
    new_tokens: int = 15
    """that each turn adds"""
    answer_tokens: int = 15
    """of each answer"""
    seed: int = 0
    """of the tokens"""
    no_server: Switch = False
    """leave out what is measured over HTTP"""
    vllm_python: Maybe[str] = None
    """interpreter that has vLLM's CPU build"""
    llama_cpp_python: Maybe[str] = None
    """interpreter that has llama-cpp-python, numpy and gguf"""
    json: Maybe[str] = None
    """write the numbers to this file"""
    plot: Maybe[str] = None
    """file for a picture of the shares"""

    def run(self) -> int:
        """Measure; returns 1 if an answer differs from that of the model without a cache."""
        if self.plot is not None:
            check_drawing(self.plot)
        check_outputs((("--json", self.json), ("--plot", self.plot)))
        for flag, python in (("--vllm-python", self.vllm_python), ("--llama-cpp-python", self.llama_cpp_python)):
            if python is not None and shutil.which(python) is None:
                raise ConfigError(f"{flag} is no program", got=python, fix="name the bin/python of an environment")
        check_least("--turns", self.turns, 4)
        shape = Shape(self.first_tokens, self.new_tokens, self.answer_tokens, self.turns)
        check_least("--first-tokens", min(shape), 5)
        scores: dict[str, dict[str, Score]] = {}
        with tempfile.TemporaryDirectory() as folder, Console(stderr=True).status("") as status:
            for label, name in CHECKPOINTS.items():
                model, own = write_model(name, Path(folder, name)), scores.setdefault(label, {})
                for measured in [library] if self.no_server else [library, served]:
                    for scenario, score in measured(model, shape, self.seed):
                        status.update(f"{label}: {scenario}")
                        own[scenario] = score
            for label, python, script in (
                ("vLLM", self.vllm_python, "hybrid_vllm.py"),
                ("llama.cpp", self.llama_cpp_python, "hybrid_llama_cpp.py"),
            ):
                if python is None:
                    print(f"{label} is left out: no interpreter was named", file=sys.stderr)
                else:
                    status.update(label)
                    command = [python, str(PEERS / script), str(Path(folder, CHECKPOINTS[HYBRID]))]
                    scores[label] = dict(peer(command, shape, self.seed))
        shares = {label: _shares(own, scores["Llama"]) for label, own in scores.items()}
        _show(scores, shares)
        if self.json is not None:
            numbers = {label: {name: score._asdict() for name, score in own.items()} for label, own in scores.items()}
            write_json(self.json, {"shape": shape._asdict(), "scores": numbers, "shares": shares})
        if self.plot is not None:
            _draw({label: each for label, each in shares.items() if label != "Llama"}, self.plot)
        return int(any(score.different for own in scores.values() for score in own.values()))


def _shares(own: dict[str, Score], of_llama: dict[str, Score]) -> dict[str, float]:
    return {name: score.cached / of_llama[name].cached for name, score in own.items()}


def _show(scores: dict[str, dict[str, Score]], shares: dict[str, dict[str, float]]) -> None:
    others = [label for label in shares if label != "Llama"]
    table = plain_table(
        ("", "prompt tokens", "Llama finds", *others),
        left=("",),
        caption="share of the tokens that Llama finds; with *: answers that differ from those without a cache",
    )
    for name, score in scores["Llama"].items():
        cells = [
            f"{shares[label][name]:.0%}{'*' * bool(scores[label][name].different)}" if name in shares[label] else "-"
            for label in others
        ]
        table.add_row(name, f"{score.prompt:,}", f"{score.cached:,}{'*' * bool(score.different)}", *cells)
    show(table)


def _draw(shares: dict[str, dict[str, float]], path: str) -> None:
    """A group of bars for each scenario."""
    from matplotlib.figure import Figure

    names = [*next(iter(shares.values()))]
    figure = Figure(figsize=(9, 0.5 + 0.42 * len(names)), layout="constrained")
    axes, height = figure.subplots(), 0.8 / len(shares)
    for number, (label, each) in enumerate(shares.items()):
        places = [place + number * height for place in range(len(names))]
        axes.barh(places, [each.get(name, 0.0) for name in names], height=height, label=label)
    axes.axvline(0.95, color="black", linewidth=0.8, linestyle="--")
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(names))], names)
    axes.invert_yaxis()
    axes.set(xlabel="tokens found, as a share of those that a Llama of the same pages finds")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=110)
