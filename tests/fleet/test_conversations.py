"""Keys of conversations: which names count, which prompts continue which, and what other tenants can find."""

import json
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfercept.errors import ConfigError
from jinfercept.fleet.conversations import MOST_PREFIXES, RoutingHint, find_conversation, response_key
from jinfercept.fleet.relay import last_event, lost_error


@pytest.mark.parametrize(
    ("path", "name", "number"),
    [("/v1/messages", "error", None), ("/v1/responses", "error", 8), ("/v1/completions", "", None)],
)
def test_a_lost_stream_ends_in_the_dialect_of_its_route(path: str, name: str, number: int | None) -> None:
    last = b'event: x\ndata: {"type":"x","sequence_number":6}\n\nevent: x\ndata: {"type":"x","sequence_number":7}\n\n'
    lines = last_event(lost_error(), path, last).decode().splitlines()
    assert lines[0].startswith(f"event: {name}" if name else "data: ")
    data = json.loads(next(line for line in lines if line.startswith("data: "))[6:])
    assert data.get("sequence_number") == number
    assert "replica" in data.get("message", "") or "replica" in data["error"]["message"]


SECRET = b"a secret of the fleet"
CHAT = "/v1/chat/completions"


def hint(
    body: dict[str, Any] | None, path: str = CHAT, headers: dict[str, str] | None = None, tenant: str = "a"
) -> RoutingHint:
    return find_conversation("POST", path, headers or {}, body, tenant, SECRET)


def keys(routing: RoutingHint) -> set[bytes]:
    return {prefix.key for prefix in routing.prefixes}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


SESSION, CACHE_KEY = hint({"session_id": "s"}).named, hint({"prompt_cache_key": "c"}).named
AGENT, AGENT_SESSION = (hint({}, headers={"session-id": name}).named for name in ("t", "s/"))


def test_the_same_name_of_another_kind_is_another_key():
    named = [hint({field: "s"}).named for field in ("session_id", "prompt_cache_key")]
    named.append(hint({}, headers={"session-id": "s"}).named)
    assert len({*named}) == 3
    assert None not in named


@pytest.mark.parametrize(
    ("headers", "body", "named"),
    [
        ({"x-session-id": "s"}, {"prompt_cache_key": "c"}, SESSION),
        ({}, {"session_id": "s"}, SESSION),
        ({}, {"jinfercept": {"session_id": "s"}}, SESSION),
        ({"thread-id": "t", "session-id": "s"}, {"prompt_cache_key": "c"}, CACHE_KEY),
        ({"x-claude-code-session-id": "s"}, {}, AGENT_SESSION),
        ({"thread-id": "t"}, {}, AGENT),
        ({"x-opencode-session": "t"}, {}, AGENT),
        ({"x-session-affinity": "t"}, {}, AGENT),
        ({}, {}, None),
    ],
)
def test_a_conversation_is_named_by_the_first_of_many_names(headers, body, named):
    assert hint({"messages": [user("hello")]} | body, headers=headers).named == named


def test_a_subagent_of_claude_code_has_a_conversation_of_its_own():
    session = {"x-claude-code-session-id": "s"}
    main, sub = hint({}, headers=session), hint({}, headers=session | {"x-claude-code-agent-id": "1"})
    assert main.named != sub.named


def test_a_stored_response_is_followed_by_its_id_in_the_body_or_in_the_path():
    key = response_key("resp_1", "a", SECRET)
    assert hint({"input": "go on", "previous_response_id": "resp_1"}, "/v1/responses").follows == key
    assert find_conversation("GET", "/v1/responses/resp_1", {}, None, "a", SECRET).follows == key
    assert find_conversation("POST", "/v1/responses/resp_1/cancel", {}, None, "a", SECRET).follows == key
    assert hint({"input": "x", "conversation": "conv_1"}).follows == hint({"conversation": {"id": "conv_1"}}).follows


@pytest.mark.parametrize(
    ("path", "first", "further"),
    [
        (CHAT, {"messages": [user("one")]}, {"messages": [user("one"), {"role": "assistant", "content": "a"}]}),
        (
            "/v1/messages",
            {"system": "s", "messages": [user("one")]},
            {"system": [{"type": "text", "text": "s"}], "messages": [user("one"), user("two")]},
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "one", "cache_control": {}}]}]},
            {"messages": [user("one"), user("two")]},
        ),
        (
            "/v1/responses",
            {"input": "one", "instructions": "i"},
            {"input": [user("one") | {"id": "m1"}, user("two")], "instructions": "i"},
        ),
        ("/v1/completions", {"prompt": "a" * 5000}, {"prompt": "a" * 5000 + "b" * 300}),
        ("/v1/completions", {"prompt": [7] * 600}, {"prompt": [[7] * 600 + [8]]}),
    ],
)
def test_a_follow_up_begins_with_the_prompt_before_it(path, first, further):
    before, after = hint(first, path), hint(further, path)
    assert before.prefixes[0].key in keys(after)
    assert [prefix.tokens for prefix in after.prefixes] == sorted(
        (prefix.tokens for prefix in after.prefixes), reverse=True
    )


def test_prompts_share_only_the_messages_before_the_first_that_differs():
    system = {"role": "system", "content": "be kind"}
    first, second = hint({"messages": [system, user("one")]}), hint({"messages": [system, user("other")]})
    assert len(keys(first) & keys(second)) == 1
    assert first.opening != second.opening
    assert not keys(hint({"model": "m", "messages": [system]})) & keys(hint({"model": "n", "messages": [system]}))
    assert not keys(hint({"messages": [system], "tools": [{"a": 1}]})) & keys(first)


def test_tenants_and_salts_share_no_keys():
    body = {"messages": [user("one")], "session_id": "s", "previous_response_id": "r"}
    hints = [hint(body), hint(body, tenant="b"), hint(body | {"cache_salt": "x"})]
    hints.append(find_conversation("POST", CHAT, {}, body, "a", b"another secret of a fleet"))
    for name in ("named", "follows", "opening"):
        assert len({getattr(routing, name) for routing in hints}) == len(hints)
    assert len(set.union(*map(keys, hints))) == len(hints)


def test_hints_are_bounded_and_picklable():
    routing_hint = hint({"messages": [user(str(number)) for number in range(5000)]})
    assert len(routing_hint.prefixes) == MOST_PREFIXES
    assert hint({"prompt": "x" * 50_000_000}, "/v1/completions").prefixes[0].tokens > 10_000_000
    assert pickle.loads(pickle.dumps(routing_hint)) == routing_hint
    assert len(pickle.dumps(routing_hint)) < 16_384


@pytest.mark.parametrize("secret", [b"", b"short", b"x" * 65])
def test_a_secret_of_a_wrong_length_is_refused(secret):
    with pytest.raises(ConfigError, match="16 to 64"):
        find_conversation("POST", CHAT, {}, {}, "", secret)


def test_bodies_that_are_nested_too_deep_give_the_keys_before_them():
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    routing_hint = hint({"messages": [user("one"), {"role": "user", "content": deep}], "tools": None})
    assert routing_hint.prefixes[0].key == hint({"messages": [user("one")]}).prefixes[0].key
    assert hint({"messages": [user("one")], "tools": deep}).prefixes == ()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [
    "messages",
    "input",
    "prompt",
    "session_id",
    "metadata",
    "jinfercept",
    "conversation",
    "tools",
    "system",
    "model",
]


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES), st.sampled_from([CHAT, "/v1/completions", "/v1/responses"]))
def test_any_json_body_gives_a_hint(body, path):
    routing_hint = hint(body, path)
    assert routing_hint == hint(json.loads(json.dumps(body)), path)
    assert routing_hint.prompt_tokens >= 0
