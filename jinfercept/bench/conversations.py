"""Conversations of given lengths, in words or in token ids, that grow by answers and tool results.

Words are so common that tokenizers have one token for each; the server's usage has the exact number of prompt tokens. Every
conversation is drawn from a seed of its own, so two of them share only their system prompt.
"""

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


class Conversation(Protocol):
    """A conversation with a server."""

    def ask(self, new_tokens: int) -> Ask:
        """The next request, for an answer of `new_tokens` tokens."""
        ...

    def extend(self, reply: ClientReply, returned: int) -> None:
        """Append an answer, and a tool's result of `returned` tokens."""
        ...


class Style(NamedTuple):
    """The form of a client's conversations.

    Attributes:
        system_tokens: tokens of the system prompt that all conversations share; 0: none.
        vocabulary: prompts are token ids below it, on `/v1/completions`; None: words, on `/v1/chat/completions`.
        tool_role: role of the messages that hold tool results.
        ignore_eos: send `ignore_eos`, so that servers generate all tokens; some do not know it.
    """

    system_tokens: int = 0
    seed: str = ""
    vocabulary: int | None = None
    tool_role: ToolRole = "tool"
    ignore_eos: bool = True

    def talk(self, model: str, prompt_tokens: int, seed: str) -> Conversation:
        common = {"model": model, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
        common |= {"ignore_eos": True} if self.ignore_eos else {}
        if self.vocabulary is not None:
            shared = _ids(Random(self.seed), self.system_tokens, self.vocabulary)
            return TokenConversation(common, shared, prompt_tokens, Random(seed), self.vocabulary)
        system = _words(Random(self.seed), self.system_tokens)
        return ChatConversation(common, system, prompt_tokens, Random(seed), self.tool_role)


@final
class ChatConversation:
    """A conversation in words: a user's message, then answers and tool results in turn."""

    def __init__(
        self, common: dict[str, Any], system: str, prompt_tokens: int, rng: Random, tool_role: ToolRole
    ) -> None:
        self._common, self._rng, self._tool_role = common, rng, tool_role
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self.messages.append({"role": "user", "content": _words(rng, prompt_tokens)})

    def ask(self, new_tokens: int) -> Ask:
        return Ask("/chat/completions", self._common | {"messages": self.messages, "max_tokens": new_tokens})

    def extend(self, reply: ClientReply, returned: int) -> None:
        result = {"role": self._tool_role, "content": _words(self._rng, returned)}
        if self._tool_role == "tool":
            result["tool_call_id"] = f"call_{len(self.messages)}"
        self.messages = [*self.messages, {"role": "assistant", "content": reply.text}, result]


@final
class TokenConversation:
    """A conversation in token ids: all tokens so far are the next prompt."""

    def __init__(
        self, common: dict[str, Any], shared: list[int], prompt_tokens: int, rng: Random, vocabulary: int
    ) -> None:
        self._common = common | {"return_token_ids": True}
        self._rng, self._vocabulary = rng, vocabulary
        self.prompt = shared + _ids(rng, prompt_tokens, vocabulary)

    def ask(self, new_tokens: int) -> Ask:
        return Ask("/completions", self._common | {"prompt": self.prompt, "max_tokens": new_tokens})

    def extend(self, reply: ClientReply, returned: int) -> None:
        """See `Conversation`. Raises `ConfigError` if the server returns no token ids."""
        if not reply.token_ids:
            raise ConfigError(
                "the server does not return token ids", got="none", fix="leave --token-ids out, or ask for --turns 1"
            )
        self.prompt = [*self.prompt, *reply.token_ids, *_ids(self._rng, returned, self._vocabulary)]


def _words(rng: Random, number: int) -> str:
    return " ".join(rng.choices(WORDS.split(), k=number))


def _ids(rng: Random, number: int, vocabulary: int) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(number)]
