"""Remembers earlier chats, so that a follow-up continues the tokens that the model read and wrote. Only new text is encoded.

Many templates write an earlier turn differently from the model: without its reasoning, with other spaces in arguments, or with
its text stripped. A prompt made of that text misses the pages of the turn, and the model reads text that it never wrote.
A conversation is found by a chain of digests: of its owner and template, then of each message and the digest before it.
"""

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from sys import getsizeof
from typing import Any, NamedTuple, final

from jinfercept.chat.messages import Message, digests
from jinfercept.chat.parsers.reasoning import REASONING_FORMATS
from jinfercept.chat.template import ChatTemplate
from jinfercept.chat.tokenizer.special_tokens import Rendered
from jinfercept.sched.tenants import ExpiringEntries, Quota

_CLOSINGS = tuple({form.closing for form in REASONING_FORMATS.values()})


class Conversation(NamedTuple):
    """A conversation up to one of its messages."""

    token_ids: "array[int]"  # of the prompt, and of the answer after it
    text: str  # of the prompt
    name: str  # digest of its owner, its template and its messages
    thoughts: tuple[str, ...]  # the reasoning of each turn of the assistant, "" for none
    segments: "Mapping[str, array[int]]"  # token ids of its texts, by segment
    before: str = ""  # name of the earlier part of it that was remembered, "" without one
    num_written: int = 0  # tokens of the model's last turn; 0: the last message is not the model's


@final
class ChatMemory:
    """The conversations of all tenants; each finds only its own.

    Thread-safe. `Quota` shares the space fairly between tenants.
    """

    def __init__(
        self,
        # of a prompt and its answer; a prompt that continues a longer conversation is made from text, which may be shorter
        max_tokens: int = 2**31,
        # limits of entries and bytes; the tenant with the most loses its least recently used entry first
        most: int = 4096,
        most_bytes: int = 2**28,
        max_age_s: float = 3600.0,  # after its last use, until an entry is forgotten
        now: Callable[[], float] = time.monotonic,  # a monotonic clock
    ) -> None:
        self._max_tokens = max_tokens
        # conversations by name, and other things that are made once for several chats
        self.entries = ExpiringEntries[Any](Quota(most, most_bytes), max_age_s, now)

    def __len__(self) -> int:
        return len(self.entries)

    def prompt(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        text: Rendered,
        tenant: str,
        salt: str,
        num_new: int = 1,
    ) -> Conversation:
        """Make the prompt of a conversation: the tokens of the earlier turn that it continues, and the text after them.

        After a message of the user, the model no longer reads a turn's reasoning, unless the template writes it there too. A
        conversation that has both is therefore made from its text, and so is one whose client has changed the reasoning or a
        message.

        Args:
            messages: checked; the model's answer comes after them.
            text: the messages as the template writes them.
            salt: of the pages; a conversation is found only with the same salt.
            num_new: tokens that may be generated after the prompt.
        """
        root, *until = digests([tenant, salt, *template.given], messages)
        earlier = [
            (place, entry)
            for place in reversed(range(len(messages)))
            if (entry := self.entries.use(until[place])) is not None
        ]
        first = None if earlier else self.entries.use(root)
        segments = earlier[0][1].segments if earlier else first.segments if first else {}
        for place, turn in earlier:
            if not _may_follow(template, messages, place, turn):
                continue
            if (behind := template.behind_turn(messages, place, text)) is None:
                break  # nor can earlier turns be continued, each of which would take a rendering
            new_ids, encoded = _encoded(template, behind, segments)
            token_ids = turn.token_ids[:-1] + new_ids  # with the template's end in place of the model's
            if len(token_ids) + num_new <= self._max_tokens:
                whole = turn.text + template.decode(turn.token_ids[-turn.num_written : -1]) + behind
                thoughts = turn.thoughts + _thoughts(messages[place + 1 :])
                segments = {**segments, **encoded}
                return self._put(tenant, Conversation(token_ids, whole, until[-1], thoughts, segments, turn.name))
        token_ids, segments = _encoded(template, text, segments)
        before = earlier[0][1].name if earlier else ""
        prompt = Conversation(token_ids, text, until[-1], _thoughts(messages), segments, before)
        if not earlier and first is None:  # for other conversations with the same tools and system message
            self._put(tenant, prompt._replace(name=root))
        return self._put(tenant, prompt)

    def remember(
        self, prompt: Conversation, tenant: str, token_ids: Sequence[int], messages: Sequence[Message]
    ) -> None:
        """Store the conversation of a prompt and its answer, of which the last token ends a turn.

        Of the conversation's earlier parts only the last one stays.
        """
        *_, digest = digests(prompt.name, messages)
        self.entries.remove(prompt.name)
        written = prompt._replace(
            token_ids=prompt.token_ids + array("i", token_ids),
            name=digest,
            thoughts=prompt.thoughts + _thoughts(messages),
            num_written=len(token_ids),
        )
        self._put(tenant, written)

    def _put(self, tenant: str, conversation: Conversation) -> Conversation:
        if (before := self.entries.peek(conversation.before)) is not None:
            self.entries.remove(before.before)
        num_bytes = 2 * (getsizeof(conversation.token_ids) + getsizeof(conversation.text))  # once more in segments
        self.entries.put(tenant, conversation.name, conversation, num_bytes)
        return conversation


class GivenTokens(NamedTuple):
    """The tokens of a conversation that its caller has, in place of the remembered ones."""

    token_ids: Sequence[int]  # prompt and answers so far, as the model read and wrote them
    # number of leading messages that these tokens are; the last of them is a turn of the assistant
    num_messages: int

    def prompt(self, template: ChatTemplate, messages: Sequence[Message]) -> Conversation:
        """Append the tokens of later messages to the given ones. Raises as `ChatTemplate.appended`."""
        end, behind = template.appended(messages[self.num_messages - 1 :])
        token_ids = array("i", self.token_ids)
        if end and token_ids[-1] not in template.end_token_ids:
            token_ids.extend(template.encode(end))
        token_ids.extend(template.encode(behind))
        return Conversation(token_ids, template.decode(token_ids), "", (), {})


def _may_follow(template: ChatTemplate, messages: Sequence[Message], place: int, turn: Conversation) -> bool:
    if not turn.num_written or place == len(messages) - 1:
        return False
    asks = any(message["role"] not in ("tool", "assistant") for message in messages[place + 1 :])
    if asks and any(turn.thoughts) and not template.keeps_reasoning:
        return False
    thoughts = zip(_thoughts(messages[: place + 1]), turn.thoughts, strict=True)
    return all(given in ("", written) for given, written in thoughts)


def _encoded(
    template: ChatTemplate, text: Rendered, ids_by_segment: "Mapping[str, array[int]]"
) -> "tuple[array[int], dict[str, array[int]]]":
    segments = template.tokenizer.segments(text)
    new = [segment for segment in dict.fromkeys(segments) if segment not in ids_by_segment]
    encoded = dict(zip(new, map(partial(array, "i"), template.tokenizer.encode_segments(new)), strict=True))
    token_ids = array("i")
    for segment in segments:
        if segment not in encoded:
            encoded[segment] = ids_by_segment[segment]
        token_ids += encoded[segment]
    return token_ids, encoded


def _thoughts(messages: Sequence[Message]) -> tuple[str, ...]:
    thoughts = list[str]()
    for message in messages:
        if message["role"] == "assistant":
            content: str = message["content"]
            # the content may contain the reasoning; reasoning that a client leaves out ("") counts as unchanged
            thought = (message.get("reasoning_content") or "").strip()
            thoughts.append(thought or (content.strip() if any(tag in content for tag in _CLOSINGS) else ""))
    return tuple(thoughts)
