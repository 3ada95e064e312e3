"""Finds the conversation of a request from its headers and its body: a `RoutingHint`, which a `Router` reads.

Names that clients send come first. Beside them stands a chain of keys over the beginnings of the prompt, one at every message
(of a text at fixed places), so that a follow-up is recognised without any name: its prompt begins with that of the turn before.

Every key is a MAC (BLAKE2b in its keyed mode, RFC 7693) over the tenant, the `cache_salt` and the client's text: two tenants
never share a key, and without the fleet's secret no text can be found from them.

Headers of coding agents:

* Claude Code: `X-Claude-Code-Session-Id`, and `X-Claude-Code-Agent-Id` in requests of a subagent, whose context is its own
  (code.claude.com/docs/en/llm-gateway-protocol, "Request headers").
* Codex: `thread-id` and `session-id` (openai/codex pull request 22193). It sends the thread as `prompt_cache_key` too.
* OpenCode: `x-opencode-session` to providers of its own, `x-session-affinity` and `X-Session-Id` to others
  (anomalyco/opencode, packages/opencode/src/session/llm/request.ts; opencode.ai/docs/go).
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jinfercept.errors import ConfigError

BYTES_PER_TOKEN = 4
"""Bytes of text per token in estimates, until a `Router` has seen real counts."""
MOST_PREFIXES = 256
"""Prefixes of a hint: the first ones and the last ones of a longer chain."""
KEY_BYTES = 16
_FIRST_PREFIXES = 8
_BLOCK_TOKENS = 256

NamedBy = Literal["", "session", "cache_key", "agent"]
"""What named a conversation: a session, a prompt cache key, a header of a coding agent; "": nothing did."""

_AGENT_HEADERS = ("thread-id", "session-id", "x-opencode-session", "x-session-affinity")
_STORED_RESPONSE = re.compile(r"^/v1/responses/([^/]+)")
_STORED_CONVERSATION = re.compile(r"^/v1/conversations/([^/]+)")


class KeyedPrefix(NamedTuple):
    """A beginning of a prompt: its MAC, and the estimated tokens of all of it."""

    key: bytes
    tokens: int


@dataclass(frozen=True, slots=True)
class RoutingHint:
    """Keys and counts of a request, by which a router chooses; no text. Small and picklable.

    Attributes:
        tenant: digest of the API key; "" without keys.
        named: key of the name that the client gave to its conversation.
        follows: key of the stored response or conversation whose context precedes the body's.
        opening: key of the prompt up to its first user message, which tells apart the conversations under one name.
        prefixes: of the prompt, longest first; empty where the body shows none.
        prompt_tokens: estimated, of the body; the context of `follows` is not in it.
        grows: whether `follows` is a conversation, whose context is longer after every answer.
    """

    tenant: str = ""
    named: bytes | None = None
    follows: bytes | None = None
    opening: bytes | None = None
    prefixes: tuple[KeyedPrefix, ...] = ()
    prompt_tokens: int = 0
    grows: bool = False

    @property
    def own_keys(self) -> list[bytes]:
        longest = self.prefixes[0].key if self.prefixes else None
        return [key for key in (self.named, longest) if key is not None]


def find_conversation(
    method: str, path: str, headers: Mapping[str, str], body: Mapping[str, Any] | None, tenant: str, secret: bytes
) -> RoutingHint:
    """The hint of a request. Never raises for what a client sent: a body that cannot be read gives fewer keys.

    Args:
        headers: by their names in lower case.
        secret: of the fleet, 16 to 64 bytes.

    Raises:
        ConfigError: the secret is too short or too long.
    """
    content = body if method == "POST" and body is not None else {}
    keys = _TenantKeys(secret, tenant, _text(content.get("cache_salt")))
    named_by, name = _name(headers, content)
    opening = None
    if path.endswith("/completions") and not path.endswith("/chat/completions"):
        chain, num_tokens = _text_chain(keys, content)
    else:
        chain, num_tokens, opening = _message_chain(keys, content)
    if len(chain) > MOST_PREFIXES:
        chain = chain[:_FIRST_PREFIXES] + chain[_FIRST_PREFIXES - MOST_PREFIXES :]
    followed, follows = _followed(path, content)
    return RoutingHint(
        tenant=tenant,
        named=keys.of(named_by, name) if name else None,
        follows=keys.of(followed, follows) if follows else None,
        grows=followed == "conversation",
        opening=opening,
        prefixes=tuple(reversed(chain)),
        prompt_tokens=num_tokens,
    )


def response_key(response_id: str, tenant: str, secret: bytes, cache_salt: str = "") -> bytes:
    """Key of a stored response, which a follow-up names as `previous_response_id`."""
    return _TenantKeys(secret, tenant, cache_salt).of("response", response_id)


class _TenantKeys:
    def __init__(self, secret: bytes, tenant: str, cache_salt: str) -> None:
        if not 16 <= len(secret) <= hashlib.blake2b.MAX_KEY_SIZE:
            raise ConfigError(
                "the secret of a fleet has a wrong length", got=f"{len(secret)} bytes", fix="give 16 to 64 random bytes"
            )
        self._root = hashlib.blake2b(key=secret, digest_size=KEY_BYTES)
        self._root.update(_framed(tenant) + _framed(cache_salt))

    def chain(self, kind: str) -> "hashlib.blake2b":
        state = self._root.copy()
        state.update(_framed(kind))
        return state

    def of(self, kind: str, name: str) -> bytes:
        state = self.chain(kind)
        state.update(_framed(name))
        return state.digest()


def _framed(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return len(data).to_bytes(8, "big") + data


# -- names -------------------------------------------------------------------------------------------------------------


def _name(headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[NamedBy, str]:
    """The conversation's name and where it was; empty texts without one."""
    extension = body.get("jinfercept")
    inner = _text(extension.get("session_id")) if isinstance(extension, Mapping) else ""
    if session := inner or _text(body.get("session_id")) or headers.get("x-session-id", ""):
        return "session", session
    if cache_key := _text(body.get("prompt_cache_key")):
        return "cache_key", cache_key
    if session := headers.get("x-claude-code-session-id", ""):
        return "agent", f"{session}/{headers.get('x-claude-code-agent-id', '')}"
    for name in _AGENT_HEADERS:
        if value := headers.get(name, ""):
            return "agent", value
    return "", ""


def _followed(path: str, body: Mapping[str, Any]) -> tuple[str, str]:
    if previous := _text(body.get("previous_response_id")):
        return "response", previous
    conversation = body.get("conversation")
    if name := _text(conversation.get("id") if isinstance(conversation, Mapping) else conversation):
        return "conversation", name
    if match := _STORED_RESPONSE.match(path):
        return "response", match[1]
    if match := _STORED_CONVERSATION.match(path):
        return "conversation", match[1]
    return "", ""


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


# -- chains of prefixes ------------------------------------------------------------------------------------------------


def _message_chain(keys: _TenantKeys, body: Mapping[str, Any]) -> tuple[list[KeyedPrefix], int, bytes | None]:
    """A key behind the tools and instructions, and one behind every message; the estimated tokens of all; the opening."""
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, Sequence):
        return [], 0, None
    instructions = _parts(body.get("system")), body.get("instructions")
    setup = (body.get("tools"), *instructions, body.get("chat_template_kwargs"))
    state = keys.chain("messages")
    prefixes, num_bytes, opening = list[KeyedPrefix](), 0, None
    try:
        head = _canonical([body.get("model"), *map(_without_marks, setup)])
        state.update(head)
        if any(setup):
            num_bytes = len(head)
            prefixes.append(KeyedPrefix(state.digest(), num_bytes // BYTES_PER_TOKEN))
        for message in messages:
            text = _canonical(_without_marks(message))
            state.update(text)
            num_bytes += len(text)
            prefixes.append(KeyedPrefix(state.digest(), num_bytes // BYTES_PER_TOKEN))
            if opening is None and isinstance(message, Mapping) and message.get("role") == "user":
                opening = prefixes[-1].key
    except (ValueError, RecursionError):  # nested too deep: what came before it still counts
        pass
    return prefixes, num_bytes // BYTES_PER_TOKEN, opening


def _without_marks(value: Any) -> Any:
    """A part of a body without the ids, the status and the `cache_control` that clients change from turn to turn.

    Whether a text is a list of one part makes no difference either.
    """
    if isinstance(value, Mapping):
        fields = {name: part for name, part in value.items() if name not in ("cache_control", "id", "status")}
        if "content" in fields:
            fields["content"] = _parts(fields["content"])
        return fields
    return [_without_marks(part) for part in value] if isinstance(value, list) else value


def _parts(content: Any) -> Any:
    if isinstance(content, str):
        return [{"text": content}]
    return [_part(part) for part in content] if isinstance(content, list) else content


def _part(part: Any) -> Any:
    if isinstance(part, Mapping):
        if isinstance(part.get("text"), str):
            return {"text": part["text"]}
        return {name: value for name, value in part.items() if name != "cache_control"}
    return part


def _canonical(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass") + b"\0"


def _text_chain(keys: _TenantKeys, body: Mapping[str, Any]) -> tuple[list[KeyedPrefix], int]:
    """Keys at fixed places of a text or a list of token ids; of several prompts, those of the first one."""
    prompt = body.get("prompt")
    prompts = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
    num_tokens = sum(len(part) // _token_width(part) for part in prompts if isinstance(part, str | list))
    prefixes, first = list[KeyedPrefix](), prompts[0]
    if not isinstance(first, str | list):
        return prefixes, num_tokens
    width, state = _token_width(first), keys.chain("text")
    step = _BLOCK_TOKENS * width
    try:
        state.update(_canonical(body.get("model")))
        for end in range(step, len(first) + 1, step):
            state.update(_canonical(first[end - step : end]))
            prefixes.append(KeyedPrefix(state.digest(), end // width))
    except (ValueError, RecursionError):  # nested too deep: what came before it still counts
        pass
    return prefixes, num_tokens


def _token_width(prompt: str | list[Any]) -> int:
    return BYTES_PER_TOKEN if isinstance(prompt, str) else 1
