"""What a client says: conversations of chosen lengths in words or in token ids, growing by answers and results of tools.

Words are so common that tokenizers have one token for each; how many tokens a prompt really has is for the server's usage to
say. Every conversation is drawn from a seed of its own, so that two share their system prompt and nothing else.
"""

from collections.abc import Callable
from random import Random
from typing import Any, Literal, NamedTuple, Protocol, final

from jinfercept.bench.openai_client import Ask, ClientReply
from jinfercept.errors import ConfigError

WORDS = (
    "the of and to in that it is was for on are as with his they be at one have this from or had by hot but some what there we "
    "can out other were all your when up use word how said an each she which do their time if will way about many then them "
    "would write like so these her long make thing see him two has look more day could go come did my sound no most number "
    "who over know water than call first people may down side been now find any new work part take get place made live where "
    "after back little only round man year came show every good me give our under name very through just form much great"
)

ToolRole = Literal["tool", "user"]


class Talk(Protocol):
    """One conversation."""

    def ask(self, new_tokens: int) -> Ask:
        """Its next request."""
        ...

    def go_on(self, reply: ClientReply, returned: int) -> None:
        """The answer came, and after it what a tool returned: so many tokens."""
        ...


MakeTalk = Callable[[str, int, str], Talk]
"""Of the model, the tokens of the first prompt and a seed."""


class Style(NamedTuple):
    """How a client talks.

    Attributes:
        system_tokens: of the prompt that all of its conversations begin with; 0: none.
        seed: of that prompt.
        vocabulary: prompts are token ids below it, on `/v1/completions`; None: words, on `/v1/chat/completions`.
        tool_role: whose messages the results of tools are.
        ignore_eos: whether servers are asked to generate all tokens, which not all of them understand.
    """

    system_tokens: int = 0
    seed: str = ""
    vocabulary: int | None = None
    tool_role: ToolRole = "tool"
    ignore_eos: bool = True

    def talk(self, model: str, prompt_tokens: int, seed: str) -> Talk:
        """A new conversation."""
        common = {"model": model, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
        common |= {"ignore_eos": True} if self.ignore_eos else {}
        if self.vocabulary is not None:
            shared = _ids(Random(self.seed), self.system_tokens, self.vocabulary)
            return TokenTalk(common, shared, prompt_tokens, Random(seed), self.vocabulary)
        system = _words(Random(self.seed), self.system_tokens)
        return ChatTalk(common, system, prompt_tokens, Random(seed), self.tool_role)


@final
class ChatTalk:
    """In words: a user's message, then answers and messages of tools by turns."""

    def __init__(
        self, common: dict[str, Any], system: str, prompt_tokens: int, rng: Random, tool_role: ToolRole
    ) -> None:
        self._common, self._rng, self._tool_role = common, rng, tool_role
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self.messages.append({"role": "user", "content": _words(rng, prompt_tokens)})

    def ask(self, new_tokens: int) -> Ask:
        return Ask("/chat/completions", self._common | {"messages": self.messages, "max_tokens": new_tokens})

    def go_on(self, reply: ClientReply, returned: int) -> None:
        result = {"role": self._tool_role, "content": _words(self._rng, returned)}
        if self._tool_role == "tool":
            result["tool_call_id"] = f"call_{len(self.messages)}"
        self.messages = [*self.messages, {"role": "assistant", "content": reply.text}, result]


@final
class TokenTalk:
    """In token ids: everything so far is the next prompt."""

    def __init__(
        self, common: dict[str, Any], shared: list[int], prompt_tokens: int, rng: Random, vocabulary: int
    ) -> None:
        self._common = common | {"return_token_ids": True}
        self._rng, self._vocabulary = rng, vocabulary
        self.prompt = shared + _ids(rng, prompt_tokens, vocabulary)

    def ask(self, new_tokens: int) -> Ask:
        return Ask("/completions", self._common | {"prompt": self.prompt, "max_tokens": new_tokens})

    def go_on(self, reply: ClientReply, returned: int) -> None:
        """As for every talk. Raises `ConfigError` if the server does not say which tokens it has generated."""
        if not reply.token_ids:
            raise ConfigError(
                "the server does not return token ids", got="none", fix="leave --token-ids out, or ask for --turns 1"
            )
        self.prompt = [*self.prompt, *reply.token_ids, *_ids(self._rng, returned, self._vocabulary)]


def _words(rng: Random, number: int) -> str:
    return " ".join(rng.choices(WORDS.split(), k=number))


def _ids(rng: Random, number: int, vocabulary: int) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(number)]
