"""What a turn of a long conversation costs before it is queued: processor ms from the body to the scheduler, by stage.

An agent returns with the whole conversation and about 300 new tokens. `whole`: its server has never seen the conversation;
`again`: it has, but has other tokens of the last turn, or none; `continued`: it wrote the last turn itself.

    python -m benchmarks.long_turns [--tokens 120000] [--protocol chat] [--tokenizer smollm2] [--repeats 5]
"""

import argparse
import gc
import glob
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import tokenizers
from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

import jinfercept
from jinfercept.chat import memory
from jinfercept.chat.request_maker import RequestMaker
from jinfercept.chat.template import ChatTemplate
from jinfercept.chat.tokenizer.load import load_tokenizer
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.engine.adapter_table import AdapterTable
from jinfercept.engine.lifecycle import RequestLifecycle
from jinfercept.engine.protocols import RealClock
from jinfercept.kv.manager import KVManager
from jinfercept.models import embedded
from jinfercept.request import Request
from jinfercept.sched.estimator import HistoryEstimator
from jinfercept.sched.named_profiles import PROFILES
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.scheduler import Scheduler
from jinfercept.serve.options import ServerOptions
from jinfercept.serve.protocols.anthropic.chat import chat_body as anthropic_chat_body
from jinfercept.serve.protocols.anthropic.schemas import MessagesBody
from jinfercept.serve.protocols.openai.chat_schemas import ChatBody
from jinfercept.serve.protocols.openai.response_chat import chat_body as response_chat_body
from jinfercept.serve.protocols.openai.response_chat import messages_of
from jinfercept.serve.protocols.openai.response_items import read_items
from jinfercept.serve.protocols.openai.response_schemas import ResponsesBody
from jinfercept.serve.protocols.openai.response_tools import ClientTools
from jinfercept.serve.routes.chat_completions import make_chat
from jinfercept.serve.routes.engine_requests import RequestHints
from jinfercept.serve.routes.guarded_route import parsed, validated
from jinfercept.serve.server_tools import ServerTools
from jinfercept.serve.service import Service
from jinfercept.serve.state.tool_history import ToolHistory

MAX_LEN, PAGE_SIZE = 2**18, 16
STAGES = ("read", "render", "tokenise", "digest", "rest", "queue")
HINTS = RequestHints(tenant="key", cache_salt="key")
TEMPLATE = r"""
{%- if tools %}{{ 'START' + 'system\nCall functions within <tool_call></tool_call>:\n' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ 'END\n' }}
{%- endif %}
{%- for message in messages %}
{{- 'START' + message.role + '\n' }}
{%- if message.role == 'tool' %}{{ '<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- else %}
{{- message.content }}
{%- for call in message.tool_calls %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{%- endif %}{{ 'END\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'STARTassistant\n' }}{% endif %}"""
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Step(NamedTuple):
    """A call of an agent, and what it reads."""

    number: int
    text: str
    command: str
    result: str


class Work(NamedTuple):
    """A conversation: its system message, and the steps of the agent."""

    system: str
    steps: Sequence[Step]


def source_text() -> str:
    """The source of the package: what agents read."""
    files = sorted(glob.glob(f"{Path(jinfercept.__file__).parent}/**/*.py", recursive=True))
    return "".join(Path(file).read_text(encoding="utf-8") for file in files)


def make_work(source: str, num_chars: int) -> Work:
    """A conversation of so many characters, of steps of 500 to 4,000."""
    rng, steps, total = random.Random(0), list[Step](), 0
    while total < num_chars:
        size, at = rng.randint(500, 4000), rng.randrange(len(source) - 4000)
        number = len(steps)
        steps.append(Step(number, f"I look at file {number}.", f"sed -n 1,{number}p", source[at : at + size]))
        total += size + 100
    return Work("You are a coding agent.\n" + source[:12_000], steps)


TOOLS = [
    {
        "name": f"tool{number}",
        "description": f"Runs command {number} and returns what it prints. " * 8,
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    }
    for number in range(18)
]


def chat_json(work: Work) -> dict[str, Any]:
    messages: list[Any] = [{"role": "system", "content": work.system}, {"role": "user", "content": "Mend it."}]
    for step in work.steps:
        function = {"name": "tool0", "arguments": json.dumps({"command": step.command})}
        call = {"id": f"call_{step.number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": step.text, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": step.result})
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    return {"messages": messages, "tools": tools, "max_tokens": 64}


def responses_json(work: Work) -> dict[str, Any]:
    items: list[Any] = [{"role": "user", "content": "Mend it."}]
    for step in work.steps:
        name, arguments = "tool0", json.dumps({"command": step.command})
        content = [{"type": "output_text", "text": step.text, "annotations": []}]
        items.append({"type": "message", "role": "assistant", "content": content})
        items.append({"type": "function_call", "call_id": f"call_{step.number}", "name": name, "arguments": arguments})
        items.append({"type": "function_call_output", "call_id": f"call_{step.number}", "output": step.result})
    tools = [{"type": "function", **tool} for tool in TOOLS]
    return {"input": items, "instructions": work.system, "tools": tools, "max_output_tokens": 64}


def messages_json(work: Work) -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": "Mend it."}]
    for step in work.steps:
        use = {"type": "tool_use", "id": f"call_{step.number}", "name": "tool0", "input": {"command": step.command}}
        messages.append({"role": "assistant", "content": [{"type": "text", "text": step.text}, use]})
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": step.result}]}
        messages.append({"role": "user", "content": [result]})
    tools = [{**tool, "input_schema": tool["parameters"]} for tool in TOOLS]
    return {"model": "m", "messages": messages, "system": work.system, "tools": tools, "max_tokens": 64}


def of_chat(body: ChatBody) -> ChatBody:
    return body


def of_responses(body: ResponsesBody) -> ChatBody:
    items = read_items(body.input, [], {})
    return response_chat_body(body, messages_of(items, body.instructions), ClientTools(body.tools or (), items))


PROTOCOLS: dict[str, tuple[Callable[[Work], dict[str, Any]], TypeAdapter[Any], Callable[[Any], ChatBody]]] = {
    "chat": (chat_json, TypeAdapter(ChatBody), of_chat),
    "responses": (responses_json, TypeAdapter(ResponsesBody), of_responses),
    "messages": (messages_json, TypeAdapter(MessagesBody), anthropic_chat_body),
}
"""Each protocol's body of a conversation, its schema, and what makes a chat of it."""


def smollm2(source: str) -> Tokenizer:
    tokenizer = load_tokenizer(embedded.fetch())
    assert tokenizer is not None
    return with_template(tokenizer.to_transformers().backend_tokenizer, "<|im_start|>", "<|im_end|>")


def llama3_like(source: str) -> Tokenizer:
    """Llama 3's way to cut words, with merges of the source."""
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    cut = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, bytes_])  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=16_000, initial_alphabet=alphabet, show_progress=False)  # pyright: ignore
    backend.train_from_iterator([source], trainer)
    backend.add_special_tokens(
        ["<|begin_of_text|>", *(f"<|reserved_special_token_{number}|>" for number in range(250))]
    )
    return with_template(backend, "<|start_header_id|>", "<|eot_id|>")


def sentencepiece_like(source: str) -> Tokenizer:
    """Llama 2's kind: whole texts, blanks as underscores, with merges of the source."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")  # pyright: ignore
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=16_000, special_tokens=special, show_progress=False)  # pyright: ignore
    backend.train_from_iterator([source[:1_000_000]], trainer)
    backend.pre_tokenizer = None  # pyright: ignore
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # pyright: ignore
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])  # pyright: ignore
    return with_template(backend, "<s>", "</s>")


def with_template(backend: tokenizers.Tokenizer, start: str, end: str) -> Tokenizer:
    backend.add_special_tokens([start, end])
    source = TEMPLATE.replace("START", start).replace("END", end)
    ends = frozenset(backend.encode(end, add_special_tokens=False).ids)
    return Tokenizer(backend, eos_token_ids=ends, chat_templates={"default": source})


TOKENIZERS = {"smollm2": smollm2, "llama-3": llama3_like, "sentencepiece": sentencepiece_like}


class Door:
    """What stands between a body and a scheduler, without sockets, threads and a model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        [self.end] = tokenizer.eos_token_ids
        self.maker = RequestMaker(tokenizer, None, [self.end], MAX_LEN, {}, lambda: None, AdapterTable())
        numbers = SimpleNamespace(config=SimpleNamespace(vocab_size=tokenizer.ids_below))
        llm = SimpleNamespace(make_chats=self.maker.make_chats, sampling_defaults={}, grammars=None, model=numbers)
        service: Any = SimpleNamespace(llm=llm, options=ServerOptions(), tools=ServerTools(), chat_template=None)
        service.tool_history = ToolHistory(3600, time.monotonic)
        service.max_model_len, service.max_prompt_chars, service.expert_bytes = MAX_LEN, 2**24, 0
        service.chat_options = lambda **more: Service.chat_options(service, **more)
        service.check_chars = lambda texts, param: Service.check_chars(service, texts, param)
        self.service = cast(Service, service)

    def forget(self) -> None:
        self.maker.forget_chats()

    def queue(self, request: Request) -> None:
        """As an engine queues it."""
        profile, estimator = PROFILES["paper-gptj-6b-a100"], HistoryEstimator()
        policy = PolicyInputs(profile, profile.saturation, PAGE_SIZE, estimator).make("copy_ahead")
        kv = KVManager(1024, 0, PAGE_SIZE)
        limits: Any = {"buckets": (1, 512), "max_num_seqs": 8, "max_model_len": MAX_LEN, "chunk_tokens": 512}
        scheduler = Scheduler(kv, policy, profile, estimator, **limits)
        vocab = self.tokenizer.ids_below
        lifecycle = RequestLifecycle(scheduler, cast(Any, None), RealClock(), vocab_size=vocab)
        started = time.process_time()
        lifecycle.reserve(request)
        lifecycle.open(request)
        self.queue_s = time.process_time() - started

    def turn(self, protocol: str, work: Work) -> tuple[dict[str, float], Request]:
        """Processor milliseconds by stage, and the request."""
        make_json, schema, convert = PROTOCOLS[protocol]
        body = json.dumps(make_json(work)).encode()
        gc.collect()
        with stages() as spent:
            started = time.process_time()
            read = validated(parsed(body), schema)
            spent["read"] = time.process_time() - started
            [request] = make_chat(self.service, convert(read), HINTS, "request")
            total = time.process_time() - started
        spent["rest"] = total - sum(spent.values())
        self.queue(request)
        spent["queue"] = self.queue_s
        return {stage: 1000 * spent[stage] for stage in STAGES}, request

    def answered(self, request: Request, step: Step) -> None:
        """The model has written a step behind the prompt of a request, in its own words."""
        function = {"name": "tool0", "arguments": json.dumps({"command": step.command})}
        call = {"id": f"call_{step.number}", "type": "function", "function": function}
        turn = {"role": "assistant", "content": step.text, "tool_calls": [call]}
        note = cast(Any, request.transcript).keywords["note"]
        note(HINTS.tenant, [*self.tokenizer.encode(step.text + " …"), self.end], [turn])


@contextmanager
def stages() -> Iterator[dict[str, float]]:
    """Counts the seconds of the functions that are stages."""
    spent, depth = defaultdict[str, float](float), [0]

    def timed(function: Any, stage: str) -> Any:
        @wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            depth[0] += 1
            started = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                depth[0] -= 1
                if not depth[0]:
                    spent[stage] += time.process_time() - started

        return wrapped

    with (
        patch.object(ChatTemplate, "render", timed(ChatTemplate.render, "render")),
        patch.object(ChatTemplate, "behind_turn", timed(ChatTemplate.behind_turn, "render")),
        patch.object(memory, "_encoded", timed(memory._encoded, "tokenise")),  # pyright: ignore
        patch.object(memory, "digests", timed(memory.digests, "digest")),
    ):
        yield spent


def measure(
    tokenizer: Tokenizer, protocol: str, work: Work, repeats: int
) -> Iterator[tuple[str, dict[str, float], int]]:
    """The least milliseconds of every stage, in each way, and the number of tokens."""
    door = Door(tokenizer)
    door.turn(protocol, work._replace(steps=work.steps[:3]))  # what is compiled or computed once
    *before, last = work.steps
    for way in ("whole", "again", "continued"):
        runs, tokens = list[dict[str, float]](), 0
        for repeat in range(repeats if way != "whole" else min(repeats, 2)):
            door.forget()
            if way != "whole":
                _, earlier = door.turn(protocol, work._replace(steps=before))
                if way == "continued":
                    door.answered(earlier, last)
            new = last._replace(result=f"{repeat}\n{last.result[:1000]}")
            spent, request = door.turn(protocol, work._replace(steps=[*before, new]))
            runs.append(spent)
            tokens = len(request.prompt_token_ids)
        yield way, {stage: min(run[stage] for run in runs) for stage in STAGES}, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=120_000)
    parser.add_argument("--protocol", action="append", choices=list(PROTOCOLS))
    parser.add_argument("--tokenizer", action="append", choices=list(TOKENIZERS))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    table = Table(box=None, pad_edge=False)
    for name in ("tokenizer", "protocol", "", "tokens", *STAGES, "ms"):
        table.add_column(name, justify="left" if name in ("tokenizer", "protocol", "") else "right")
    source = source_text()
    for name in options.tokenizer or TOKENIZERS:
        tokenizer = TOKENIZERS[name](source)
        num_chars = options.tokens * len(source[:100_000]) // len(tokenizer.encode(source[:100_000]))
        work = make_work(source, num_chars)
        for protocol in options.protocol or PROTOCOLS:
            for way, spent, tokens in measure(tokenizer, protocol, work, options.repeats):
                cells = [f"{spent[stage]:.1f}" for stage in STAGES]
                table.add_row(name, protocol, way, f"{tokens:,}", *cells, f"{sum(spent.values()):.1f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
