"""The history of server tool calls: its matching, its expiry, its limits per tenant."""

from typing import Any

from jinfercept.serve.server_tools import ToolHistory, num_bytes_of

ASKED: list[Any] = [{"role": "user", "content": "How much?"}]


def call(name: str, id: str, arguments: Any = "{}") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": id}


def turn(content: str, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({"tool_calls": [*calls]} if calls else {})}


ROUND = [turn("Wait.", call("price", "a")), result("a")]
NUM_BYTES = num_bytes_of((*ROUND, turn("23."))) + 100
ANSWER = turn("Wait.\n\n23.")


def memory(now: Any = lambda: 0.0, **limits: int) -> ToolHistory:
    return ToolHistory(10.0, now, **limits)


def test_an_answer_with_calls_is_known_by_the_conversation_and_not_by_ids_that_models_choose() -> None:
    hidden = memory()
    last = turn("", call("send", "functions.send:1", '{"to": "a", "sum": 2}'))
    shown = turn("Wait.", *last["tool_calls"])
    hidden.remember("key", "", [*ASKED, shown], [*ROUND, last])
    again = turn(" Wait.\n", call("send", "functions.send:1", {"sum": 2, "to": "a"}))
    for same in (shown, again):
        assert hidden.restored("", [*ASKED, same]) == [*ASKED, *ROUND, last]
    other = [{"role": "user", "content": "How many?"}, shown, result("functions.send:1")]
    edited = turn("Wait.", call("send", "functions.send:1", '{"to": "b", "sum": 2}'))
    renamed = turn("Wait.", call("lend", "functions.send:1", '{"to": "a", "sum": 2}'))
    for given in (other, [*ASKED, edited], [*ASKED, renamed], [*ASKED, shown | {"content": None}]):
        assert hidden.restored("", given) == given
    before = [*ASKED, turn("", call("price", "c", '{"item": "pen"}')), result("c")]
    hidden.remember("key", "", [*before, shown], [*ROUND, last])
    assert len(hidden.restored("", [*before, shown])) == len(before) + 3
    before[1] = turn("", call("price", "c", '{"item": "lamp"}'))
    assert hidden.restored("", [*before, shown]) == [*before, shown]


def test_it_lasts_for_a_while_after_it_was_last_asked_for() -> None:
    now = 0.0
    hidden = memory(lambda: now)
    hidden.remember("key", "", [*ASKED, ANSWER], [*ROUND, turn("23.")])
    for _ in range(3):
        now += 9
        assert len(hidden.restored("", [*ASKED, ANSWER])) == 4
    now += 11
    assert len(hidden.restored("", [*ASKED, ANSWER])) == 2
    hidden.remember("key", "", [ANSWER], [*ROUND, turn("23.")])
    assert len(hidden) == 1


def test_what_nobody_asked_for_longest_goes_first() -> None:
    for limits in ({"most": 2}, {"most_bytes": 2 * NUM_BYTES}):
        hidden = memory(**limits)
        conversations = [[{"role": "user", "content": f"{number}"}] for number in range(3)]
        for conversation in conversations[:2]:
            hidden.remember("key", "", [*conversation, ANSWER], [*ROUND, turn("23.")])
        assert len(hidden.restored("", [*conversations[0], ANSWER])) == 4
        hidden.remember("key", "", [*conversations[2], ANSWER], [*ROUND, turn("23.")])
        assert [len(hidden.restored("", [*messages, ANSWER])) for messages in conversations] == [4, 2, 4]


def test_a_tenant_that_has_many_costs_another_none_however_it_salts_them() -> None:
    for limits in ({"most": 6}, {"most_bytes": 6 * NUM_BYTES}):
        hidden = memory(**limits)
        hidden.remember("polite", "mine", [*ASKED, ANSWER], [*ROUND, turn("23.")])
        for number in range(34):
            salt, messages = f"salt {number}", [{"role": "user", "content": f"{number}"}]
            hidden.remember("hostile", salt, [*messages, ANSWER], [*ROUND, turn("23.")])
            assert len(hidden.restored(salt, [*messages, ANSWER])) == 4
        assert len(hidden) == 6
        assert len(hidden.restored("mine", [*ASKED, ANSWER])) == 4
