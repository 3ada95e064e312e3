"""A model that writes what a script says: whatever token stands where the script has it, the script's next one follows."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.llm import LLM
from jinfercept.models.blocks import Attend
from jinfercept.models.protocol import Params, Weights
from jinfercept.runner.runner import ModelRunner
from jinfercept.start.start import set_up
from tests.support.sample_tokenizers import byte_backend

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    *(
        "[/TOOL_RESULTS]",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
        "<|begin_of_text|>",
    ),
)
ENDS = ("<|im_end|>", "</s>", "<|eot_id|>")
LENGTH = 2048


@dataclass(frozen=True)
class Numbers:
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    family: str = "scripted"
    hidden_size: int = 8
    num_layers: int = 1
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 8
    max_position: int = LENGTH


class ScriptedModel:
    """The token that follows is looked up by position and token; attention is computed and left out."""

    def __init__(self, numbers: Numbers) -> None:
        self.config = numbers

    def embed(self, params: Weights, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        return jnp.zeros((tokens.shape[0], 8)).at[:, 0].set(tokens.astype(jnp.float32)) + params["zero"]

    def layer[KV](
        self, params: Weights, x: jax.Array, positions: jax.Array, kv: KV, attend: Attend[KV]
    ) -> tuple[jax.Array, KV]:
        heads = x[:, None, :]
        _, kv = attend(heads, heads, heads, kv)
        follows = params["next"][jnp.clip(positions, 0, self.config.max_position - 1), x[:, 0].astype(jnp.int32)]
        return x.at[:, 1].set(follows.astype(jnp.float32)), kv

    def head(self, params: Weights, x: jax.Array) -> jax.Array:
        return 30.0 * jax.nn.one_hot(x[:, 1].astype(jnp.int32), self.config.vocab_size) + params["zero"]


def byte_tokenizer(chat_template: str | None) -> Tokenizer:
    """A token a byte, and the families' special tokens."""
    backend = byte_backend(special=SPECIAL)
    ends = frozenset(id for end in ENDS if (id := backend.token_to_id(end)) is not None)
    templates = {} if chat_template is None else {"default": chat_template}
    return Tokenizer(
        backend, eos_token_ids=ends, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, chat_templates=templates
    )


class Scripted:
    """An `LLM` of the scripted model, and its runner."""

    def __init__(self, llm: LLM, runner: ModelRunner) -> None:
        self.llm, self.runner = llm, runner

    def follow(self, *texts: str, end_every: int | None = None) -> None:
        """Whole streams, prompts included. Of two that have one token in one place, the last counts; what
        none has is followed by the first token of the vocabulary, or at every so many places by an end."""
        tokenizer, vocab = self.tokenizer, self.llm.model.config.vocab_size
        table = np.zeros((self.llm.model.config.max_position, vocab), np.int32)
        if end_every is not None:
            table[::end_every] = tokenizer.encode(ENDS[0])[0]
        for text in texts:
            ids = tokenizer.encode(text)
            for place, (token, follows) in enumerate(pairwise(ids)):
                table[place, token] = follows
        old = self.runner.params
        self.runner.use(Params(old.embed, ({"next": table},), old.head))

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.llm.tokenizer is not None
        return self.llm.tokenizer


Make = Callable[[str | None], Scripted]
"""Gives the LLM with a chat template, and empty pages."""


@contextmanager
def scripted_llm(length: int = LENGTH, **flags: Any) -> Iterator[Make]:
    """Compiles once, what steps need.

    Args:
        length: of the longest sequence.
        flags: more options of the LLM.
    """
    bare = byte_tokenizer(None)
    numbers = Numbers(bare.vocab_size, tuple(bare.eos_token_ids), max_position=length)
    zero = jnp.zeros(1)
    params = Params({"zero": zero}, ({"next": jnp.zeros((length, bare.vocab_size), jnp.int32)},), {"zero": zero})
    sizes = {"kv_tokens": 2 * length, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    options = {"check_pages": True, "profile": "paper-gptj-6b-a100", "lazy": True}
    setup = set_up(ScriptedModel(numbers), params=params, tokenizer=bare, **sizes, **options, **flags)
    with LLM(setup) as llm:

        def with_template(chat_template: str | None) -> Scripted:
            llm.restart()
            llm.tokenizer = llm._requests.tokenizer = byte_tokenizer(chat_template)  # pyright: ignore[reportPrivateUsage]
            return Scripted(llm, setup.runner)

        yield with_template


def write_turns(
    monkeypatch: pytest.MonkeyPatch, scripted: Scripted, written: Sequence[str], tool: str | None
) -> list[str]:
    """Has the model write a text for each prompt that offers a tool, and a title for other prompts.

    Args:
        written: the texts.
        tool: its name; None: every prompt gets a text.

    Returns:
        The prompts that got a text, as they come.
    """
    prompts: list[str] = []
    make_chats = scripted.llm.make_chats

    def scripting(*args: Any, **more: Any) -> Any:
        made = make_chats(*args, **more)
        prompt = made[0].prompt
        assert prompt is not None
        says = "A title"  # of the conversation, for which some programs ask first, without tools
        if tool is None or f'"name": "{tool}"' in prompt:
            says = written[len(prompts)]
            prompts.append(prompt)
        scripted.follow(prompt + says + ENDS[0])
        return made

    monkeypatch.setattr(scripted.llm, "make_chats", scripting)
    return prompts
