"""The bodies that the Codex CLI sends to `/v1/responses`: tools of types that no chat has, streamed, over three turns."""

import json
from typing import Any

import pytest

from jinfercept.serve.protocols.errors import ApiError
from jinfercept.serve.protocols.openai.response_items import read_items
from jinfercept.serve.protocols.openai.response_schemas import ResponsesBody
from jinfercept.serve.protocols.openai.response_tools import ClientTools, client_call_value
from tests.support.live_server import END, Running, prompt_of
from tests.support.scripted_model import Scripted

GRAMMAR = 'start: "*" /.+/'
PATH: Any = {"type": "object", "properties": {"path": {"type": "string"}}}
TARGET: Any = {"type": "object", "properties": {"target": {"type": "string"}}}
TOOLS: Any = [
    {"type": "function", "name": "exec_command", "description": "Runs.", "strict": False, "parameters": PATH},
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits.",
        "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
    },
    {
        "type": "namespace",
        "name": "multi_agent_v1",
        "description": "Sub-agents.",
        "tools": [
            {"type": "function", "name": "close_agent", "strict": False, "parameters": TARGET},
            {"type": "custom", "name": "note"},
        ],
    },
    {"type": "local_shell"},
    {"type": "web_search", "external_web_access": True},
]
TEXT: Any = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
COMMAND: Any = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
        "env": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["command"],
    "additionalProperties": False,
}
CHAT_TOOLS: Any = [
    {"type": "function", "function": function}
    for function in (
        {"name": "exec_command", "description": "Runs.", "parameters": PATH, "strict": False},
        {
            "name": "apply_patch",
            "description": f"Edits.\n\nThe input follows this lark grammar:\n{GRAMMAR}",
            "parameters": TEXT,
        },
        {"name": "multi_agent_v1__close_agent", "parameters": TARGET, "strict": False},
        {"name": "multi_agent_v1__note", "parameters": TEXT},
        {"name": "local_shell", "description": "Runs a command on the user's machine.", "parameters": COMMAND},
    )
]


def message(role: str, text: str) -> Any:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


class Codex:
    """A client that answers as Codex does: it keeps the items that are done, without their `status`."""

    def __init__(self, served: Running) -> None:
        self.items = [message("developer", "Be exact."), message("user", "<cwd>/</cwd>"), message("user", "Hi")]
        self._served = served
        self._body: Any = {
            "model": "scripted",
            "instructions": "You are Codex.",
            "tools": TOOLS,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "ultra", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "01a2",
            "client_metadata": {"session_id": "01a2"},
            "temperature": 0,
        }

    def turn(self, *results: Any) -> list[Any]:
        """The output items of a turn, which come in typed events."""
        self.items += results
        answer = self._served.http.post("/v1/responses", json=self._body | {"input": self.items})
        assert answer.status_code == 200, answer.text
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events[-1]["type"] == "response.completed", events[-1]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"]
        for item in done:
            inputs = [e for e in events if e.get("item_id") == item["id"] and "custom_tool_call_input" in e["type"]]
            whole = [item["input"]] * 2 if item["type"] == "custom_tool_call" else []
            assert [e.get("delta", e.get("input")) for e in inputs] == whole
        self.items += [{name: value for name, value in item.items() if name != "status"} for item in done]
        return done


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def calls(made: list[tuple[str, Any, str]]) -> str:
    return "\n".join(call(name, arguments) for name, arguments, _ in made)


def turn(*calls: tuple[str, Any, str]) -> list[Any]:
    """A turn of the assistant, and the results of its calls."""
    made = [{"id": name, "function": {"name": name, "arguments": json.dumps(given)}} for name, given, _ in calls]
    results = [{"role": "tool", "tool_call_id": name, "name": name, "content": text} for name, _, text in calls]
    return [{"role": "assistant", "content": "", "tool_calls": made}, *results]


def test_three_turns_with_tools_of_every_type(served: Running, scripted: Scripted) -> None:
    system = [{"role": "system", "content": text} for text in ("You are Codex.", "Be exact.")]
    chat: Any = [*system, *({"role": "user", "content": text} for text in ("<cwd>/</cwd>", "Hi"))]
    first = [("exec_command", {"path": "a"}, "ok"), ("multi_agent_v1__close_agent", {"target": "x"}, "closed")]
    second = [
        ("apply_patch", {"input": '* "a"\n+ b'}, "Done"),
        ("local_shell", {"command": ["ls", "-l"], "timeout_ms": 9}, "a b"),
    ]

    codex = Codex(served)
    scripted.follow(prompt_of(scripted, chat, CHAT_TOOLS) + calls(first) + END)
    run, close = codex.turn()
    assert (run["type"], run["name"], json.loads(run["arguments"])) == ("function_call", "exec_command", {"path": "a"})
    assert "namespace" not in run
    assert (close["type"], close["name"], close["namespace"]) == ("function_call", "close_agent", "multi_agent_v1")

    chat += turn(*first)
    scripted.follow(prompt_of(scripted, chat, CHAT_TOOLS) + calls(second) + END)
    patch, shell = codex.turn(
        {
            "type": "function_call_output",
            "call_id": close["call_id"],
            "output": [{"type": "input_text", "text": "closed"}],
        },
        {"type": "function_call_output", "call_id": run["call_id"], "output": "ok"},
    )
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", '* "a"\n+ b')
    assert (shell["type"], shell["action"]["command"]) == ("local_shell_call", ["ls", "-l"])

    chat += turn(*second)
    scripted.follow(prompt_of(scripted, chat, CHAT_TOOLS) + "All done." + END)
    [text] = codex.turn(
        {"type": "custom_tool_call_output", "call_id": patch["call_id"], "output": "Done"},
        {"type": "function_call_output", "call_id": shell["call_id"], "output": "a b"},
    )
    assert text["content"][0]["text"] == "All done."


@pytest.mark.parametrize(
    ("chosen", "function"),
    [
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "local_shell"}, "local_shell"),
        ({"type": "function", "name": "close_agent", "namespace": "multi_agent_v1"}, "multi_agent_v1__close_agent"),
        ({"type": "function", "name": "multi_agent_v1__close_agent"}, "multi_agent_v1__close_agent"),
        ({"type": "custom", "name": "close_agent"}, None),
        ({"type": "function", "name": "tool_of_the_server"}, "tool_of_the_server"),
        ({"type": "web_search"}, None),
        ({"type": "namespace", "name": "multi_agent_v1"}, None),
    ],
)
def test_one_tool_of_any_type_can_be_required(chosen: dict[str, Any], function: str | None) -> None:
    body = ResponsesBody.model_validate({"input": "Hi", "tools": TOOLS, "tool_choice": chosen})
    tools = ClientTools(body.tools or ())
    if function is None:
        with pytest.raises(ApiError, match="tool_choice"):
            tools.chat_choice(body.tool_choice)
    else:
        assert tools.chat_choice(body.tool_choice)["function"]["name"] == function


def test_a_call_without_its_namespace_is_of_the_only_tool_of_that_name() -> None:
    twice = [*TOOLS, {"type": "namespace", "name": "other", "tools": [{"type": "function", "name": "close_agent"}]}]
    for given, namespace in ((TOOLS, "multi_agent_v1"), (twice, None)):
        body = ResponsesBody.model_validate({"input": "Hi", "tools": given})
        _, fields = ClientTools(body.tools or ()).call_fields("close_agent")
        assert fields.get("namespace") == namespace


@pytest.mark.parametrize(
    ("kind", "arguments", "value"),
    [
        ("custom_tool_call", '{"input": 3}', '{"input": 3}'),
        ("custom_tool_call", '{"input": "a', '{"input": "a'),
        ("custom_tool_call", "*** Begin", "*** Begin"),
        ("local_shell_call", '{"command": "ls | wc"}', ["bash", "-lc", "ls | wc"]),
        ("local_shell_call", '{"command": [1], "env": 3}', []),
        ("local_shell_call", "[" * 100_000, []),
    ],
)
def test_arguments_of_any_form_make_an_item_of_the_calls_type(kind: str, arguments: str, value: Any) -> None:
    made = client_call_value(kind, arguments)
    assert (made["command"] if kind == "local_shell_call" else made) == value


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_offered(served: Running, scripted: Scripted, mode: str) -> None:
    chat: Any = [{"role": "user", "content": "Hi"}]
    scripted.follow(prompt_of(scripted, chat, CHAT_TOOLS[2:4]) + call("multi_agent_v1__note", {"input": "n"}) + END)
    allowed = [{"type": "namespace", "name": "multi_agent_v1"}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": mode, "tools": allowed}
    body = {"input": "Hi", "tools": TOOLS, "tool_choice": choice, "temperature": 0}
    done = served.http.post("/v1/responses", json=body).json()
    [note] = done["output"]
    assert (note["type"], note["namespace"], note["input"]) == ("custom_tool_call", "multi_agent_v1", "n")
    assert (note["name"], done["tool_choice"]) == ("note", choice)
    named = [{"type": "function", "function": {"name": tool["function"]["name"]}} for tool in CHAT_TOOLS[2:4]]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    [answer] = served.chat(messages=chat, tools=CHAT_TOOLS, tool_choice=choice, max_tokens=99).json()["choices"]
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "multi_agent_v1__note"
    missing = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [named[0] | {"function": {"name": "x"}}]},
    }
    assert served.chat(tools=CHAT_TOOLS, tool_choice=missing).json()["error"]["param"] == "tool_choice"


SEARCH: Any = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": PATH}
FOUND: Any = {
    "type": "namespace",
    "name": "mcp__shop",
    "description": "A shop.",
    "tools": [{"type": "function", "name": "close", "defer_loading": True, "parameters": TARGET}],
}
SEARCH_FUNCTION: Any = {"name": "tool_search", "description": "Finds tools.", "parameters": PATH}
FOUND_FUNCTION: Any = {"name": "mcp__shop__close", "parameters": TARGET}


@pytest.mark.parametrize("stored", [False, True])
def test_tools_that_a_search_has_found_are_declared_in_its_result(
    served: Running, scripted: Scripted, stored: bool
) -> None:
    tools: Any = [{"type": "function", "function": SEARCH_FUNCTION}]
    declared = json.dumps({"type": "function", "function": FOUND_FUNCTION})
    chat: Any = [{"role": "user", "content": "Hi"}]
    searched = turn(("tool_search", {"path": "shop"}, declared))
    closed = turn(("mcp__shop__close", {"target": "x"}, "closed"))
    says = (call("tool_search", {"path": "shop"}), call("mcp__shop__close", {"target": "x"}), "Done.")
    chats = (chat, chat + searched, chat + searched + closed)
    scripted.follow(*(prompt_of(scripted, c, tools) + s + END for c, s in zip(chats, says, strict=True)))

    items: Any = [message("user", "Hi")]
    body: Any = {"tools": [SEARCH, {"type": "tool_search"}], "temperature": 0}

    def answer(*results: Any) -> Any:
        items.extend(results)
        done = served.http.post("/v1/responses", json=body | {"input": items}).json()
        if stored:
            body["previous_response_id"] = done["id"]
            items.clear()
        else:
            items.extend(done["output"])
        return done["output"][0]

    search = answer()
    assert (search["type"], search["execution"], search["arguments"]) == (
        "tool_search_call",
        "client",
        {"path": "shop"},
    )
    result = {"type": "tool_search_output", "execution": "client", "status": "completed", "tools": [FOUND]}
    close = answer(result | {"call_id": search["call_id"]})
    assert (close["type"], close["namespace"], close["name"]) == ("function_call", "mcp__shop", "close")
    text = answer({"type": "function_call_output", "call_id": close["call_id"], "output": "closed"})
    assert text["content"][0]["text"] == "Done."


def test_a_number_that_json_cannot_write_is_text_in_the_arguments_of_a_search(
    served: Running, scripted: Scripted
) -> None:
    tools: Any = [{"type": "function", "function": SEARCH_FUNCTION}]
    written = call("tool_search", {"path": "shop"}).replace('"shop"', "[1e400, NaN]")
    scripted.follow(prompt_of(scripted, [{"role": "user", "content": "Hi"}], tools) + written + END)
    body: Any = {"input": "Hi", "tools": [SEARCH], "temperature": 0}
    [search] = served.http.post("/v1/responses", json=body).json()["output"]
    assert search["arguments"] == {"path": ["1e400", "NaN"]}


def test_additional_tools_are_those_of_the_body(served: Running, scripted: Scripted) -> None:
    tools = [{"type": "function", "function": FOUND_FUNCTION}]
    chat: Any = [{"role": "user", "content": "Hi"}]
    scripted.follow(prompt_of(scripted, chat, tools) + call("mcp__shop__close", {"target": "x"}) + END)
    more = {"type": "additional_tools", "role": "developer", "tools": [FOUND, {"type": "web_search"}]}
    for choice in ("auto", {"type": "function", "name": "close", "namespace": "mcp__shop"}):
        body = {"input": [more, message("user", "Hi"), more], "tool_choice": choice, "temperature": 0}
        [close] = served.http.post("/v1/responses", json=body).json()["output"]
        assert (close["type"], close["namespace"], close["arguments"]) == (
            "function_call",
            "mcp__shop",
            '{"target": "x"}',
        )


def test_a_search_of_the_provider_is_left_out() -> None:
    results = [
        {"type": "tool_search_call", "arguments": {}},
        {"type": "tool_search_output", "tools": [], "call_id": None},
    ]
    body = ResponsesBody.model_validate({"input": results, "tools": [{"type": "tool_search"}, *TOOLS]})
    assert read_items(body.input, [], {}) == []
    assert len(ClientTools(body.tools or ()).declarations) == len(CHAT_TOOLS)
    twice = {"type": "tool_search_output", "tools": [TOOLS[0], TOOLS[0]]}
    assert len(ClientTools((), [twice]).declarations) == 1  # the first of a name counts
