"""The tokens of chats that have ended, by their messages: a follow-up continues from them, whatever its template would write.

Many templates write a turn of the past in another way than the model wrote it: without its reasoning, with other spaces in
arguments, with its text stripped. A prompt made of that misses the pages of the turn, and the model reads what it never wrote.
A server keeps one `TurnTokens`.
"""

import hashlib
import time
from array import array
from collections.abc import Callable, Sequence
from sys import getsizeof
from typing import NamedTuple, final

from jinfercept.chat.messages import Message, digests
from jinfercept.chat.template import ChatTemplate, Rendered
from jinfercept.parsers.reasoning import REASONING_FORMATS
from jinfercept.tenants.quota import ExpiringEntries, Quota
from jinfercept.tokenizer.segments import SegmentTokens

MOST, MOST_BYTES, MAX_AGE_S = 4096, 2**28, 3600.0
_CLOSINGS = tuple({form.closing for form in REASONING_FORMATS.values()})


class _Chat(NamedTuple):
    """The tokens of a chat up to the end of a turn.

    Attributes:
        token_ids: the prompt, and what follows it.
        num_written: tokens that follow the prompt.
        reasons: whether there is reasoning among them.
        thoughts: digests of the reasoning of each turn of the assistant, b"" for none.
        before: name of the chat that this one has continued, "" without one.
    """

    tenant: str
    token_ids: "array[int]"
    num_written: int
    text: str
    reasons: bool
    thoughts: tuple[bytes, ...]
    before: str


class Continued(NamedTuple):
    """The prompt of a chat.

    Attributes:
        digest: of its template and its messages.
        reasons: whether there is reasoning of earlier turns in it.
        thoughts: digests of the reasoning of each earlier turn of the assistant, b"" for none.
        before: name of the chat that it continues, "" without one.
    """

    token_ids: "array[int]"
    text: str
    digest: bytes
    reasons: bool
    thoughts: tuple[bytes, ...]
    before: str = ""


@final
class TurnTokens:
    """The chats of all tenants; each finds its own. Thread-safe. Space is shared fairly between tenants (`Quota`).

    Args:
        max_tokens: of a prompt and what is written behind it; one that would have more is made of text, which may be shorter.
        most, most_bytes: maximum chats and bytes; the tenant with the most loses its least recently used chat first.
        max_age_s: seconds until a chat is forgotten, since its last use.
        now: a monotonic clock.
    """

    def __init__(
        self,
        max_tokens: int = 2**31,
        most: int = MOST,
        most_bytes: int = MOST_BYTES,
        max_age_s: float = MAX_AGE_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_tokens = max_tokens
        self._segments = SegmentTokens(max_age_s=max_age_s, now=now)
        self._chats = ExpiringEntries[_Chat](Quota(most, most_bytes), max_age_s, now)

    def __len__(self) -> int:
        return len(self._chats)

    def prompt(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        text: Rendered,
        tenant: str,
        salt: str,
        num_new: int = 1,
    ) -> Continued:
        """The prompt of a conversation: the tokens of the chat that it continues, and the text behind them.

        Behind a message of the user a turn's reasoning is no longer read, unless the template writes it there too: a
        conversation with both is made of its text. So is one whose client has changed the reasoning, or any message.

        Args:
            messages: with an answer of the model to come.
            salt: of its pages; chats are found only with the same one.
            num_new: tokens that may be written behind it.
        """
        until = digests([salt, *template.given], messages)
        if any(message["role"] == "assistant" for message in messages[:-1]):
            continued = self._continued(template, messages, until, text, tenant, salt, num_new)
            if continued is not None:
                return continued
        reasons, thoughts = _has_reasoning(messages), _thoughts(messages)
        ids = self._encoded(template, text, tenant, salt)
        return Continued(ids, text, until[-1], reasons, thoughts)

    def _continued(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        until: Sequence[bytes],
        text: Rendered,
        tenant: str,
        salt: str,
        num_new: int,
    ) -> Continued | None:
        """The prompt that continues the last turn whose chat is there; None if no chat may be continued."""
        asks = False
        for place in range(len(messages) - 2, -1, -1):
            asks |= messages[place + 1]["role"] not in ("tool", "assistant")
            if messages[place]["role"] != "assistant":
                continue
            name = until[place].hex()
            chat = self._chats.use(name)
            if chat is None or chat.tenant != tenant or (asks and chat.reasons and not template.keeps_reasoning):
                continue
            thoughts = _thoughts(messages[: place + 1])
            if len(thoughts) != len(chat.thoughts) or any(
                thought and thought != written for thought, written in zip(thoughts, chat.thoughts, strict=True)
            ):
                continue
            if (behind := template.behind_turn(messages, place, text)) is None:
                return None  # not behind earlier turns either, each of which would take a rendering
            ids = chat.token_ids[:-1]
            ids.extend(self._encoded(template, behind, tenant, salt))  # with the template's end in place of the model's
            if len(ids) + num_new <= self._max_tokens:
                written = template.decode(chat.token_ids[-chat.num_written : -1])
                thoughts = chat.thoughts + _thoughts(messages[place + 1 :])
                return Continued(ids, chat.text + written + behind, until[-1], chat.reasons, thoughts, name)
        return None

    def remember(self, tenant: str, prompt: Continued, token_ids: Sequence[int], messages: Sequence[Message]) -> None:
        """Store the tokens of a chat whose last turn has ended; of the chats before it only the last one stays.

        Args:
            token_ids: that follow the prompt; the last one ends a turn.
        """
        *_, digest = digests(prompt.digest, messages)
        ids = prompt.token_ids + array("i", token_ids)
        reasons = prompt.reasons or _has_reasoning(messages)
        thoughts = prompt.thoughts + _thoughts(messages)
        chat = _Chat(tenant, ids, len(token_ids), prompt.text, reasons, thoughts, prompt.before)
        if (before := self._chats.peek(prompt.before)) is not None:
            self._chats.remove(before.before)
        self._chats.put(tenant, digest.hex(), chat, getsizeof(ids) + getsizeof(prompt.text))

    def _encoded(self, template: ChatTemplate, text: Rendered, tenant: str, salt: str) -> "array[int]":
        return self._segments.encode(template.tokenizer, template.segments(text), tenant, salt)


@final
class GivenTokens:
    """Stands in for `TurnTokens` where the caller has the tokens of one conversation.

    Args:
        token_ids: prompt and answers so far, as the model had and wrote them.
        num_messages: leading messages of the conversation that these tokens are; the last one is a turn of the assistant.
    """

    def __init__(self, token_ids: Sequence[int], num_messages: int) -> None:
        self._token_ids, self._num_messages = token_ids, num_messages

    def prompt(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        text: Rendered,
        tenant: str,
        salt: str,
        num_new: int = 1,
    ) -> Continued:
        """The given tokens and those of the messages behind them. Arguments and errors as those of `TurnTokens.prompt` and
        `ChatTemplate.appended`."""
        del text, tenant, salt, num_new
        end, behind = template.appended(messages[self._num_messages - 1], messages[self._num_messages :])
        ids = array("i", self._token_ids)
        if end and not template.ends_turn(ids[-1]):
            ids.extend(template.encode(end))
        ids.extend(template.encode(behind))
        return Continued(ids, template.decode(ids), b"", False, ())

    def remember(self, tenant: str, prompt: Continued, token_ids: Sequence[int], messages: Sequence[Message]) -> None:
        """Does nothing: the caller has the tokens."""


def _thoughts(messages: Sequence[Message]) -> tuple[bytes, ...]:
    """Digests of the reasoning beside each turn of the assistant, b"" for none: what clients leave out counts as unchanged."""
    thoughts = list[bytes]()
    for message in messages:
        if message["role"] == "assistant":
            apart = message.get("reasoning_content") or message.get("reasoning")
            thought = apart.strip() if isinstance(apart, str) else ""
            digest = hashlib.sha256(thought.encode(errors="surrogatepass")).digest()[:16]
            thoughts.append(digest if thought else b"")
    return tuple(thoughts)


def _has_reasoning(messages: Sequence[Message]) -> bool:
    """Whether there is reasoning in turns of the assistant, told from their content or not."""
    for message in messages:
        if message["role"] == "assistant":
            content, apart = message.get("content"), message.get("reasoning_content") or message.get("reasoning")
            if (apart and apart.strip()) or (isinstance(content, str) and any(tag in content for tag in _CLOSINGS)):
                return True
    return False
