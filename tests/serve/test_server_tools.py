"""Tools that the server runs for a chat: OpenAI's client sees the answer, without the calls."""

from pathlib import Path
from typing import Any

import openai
import pytest

from jinfercept.cli.main import main
from jinfercept.errors import ConfigError
from jinfercept.serve.server_tools import open_server_tools
from tests.support.live_server import END, Running
from tests.support.scripted_model import Scripted
from tests.support.tool_server import ALL, QUESTION, ask, asks, called, returned, says

LAMP = [*QUESTION, called("Let me see.", ("price", "lamp")), returned("23")]


def test_the_server_runs_its_tools_and_the_client_sees_the_answer(server: Running, scripted: Scripted) -> None:
    says(scripted, server, "It costs 23.", LAMP)
    done = ask(server, QUESTION)
    [choice] = done.choices
    assert (choice.message.content, choice.message.tool_calls) == ("Let me see.\n\nIt costs 23.", None)
    assert choice.finish_reason == "stop"
    [report] = done.jinfercept["server_calls"]
    assert (report["choice"], report["round"], report["name"], report["status"]) == (0, 0, "price", "ok")
    assert 0 <= report["seconds"] < 5
    assert report["context"].keys() == {"kept", "copied_in", "recomputed"}
    assert report["context"]["kept"] > 100


def test_a_stream_shows_the_same_and_tells_of_calls_beside_it(server: Running, scripted: Scripted) -> None:
    says(scripted, server, "It costs 23.", LAMP)
    chunks = list(ask(server, QUESTION, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert "".join(delta.content or "" for delta in deltas) == "Let me see.\n\nIt costs 23."
    assert all(delta.tool_calls is None for delta in deltas)
    assert chunks[-2].choices[0].finish_reason == "stop"
    told = [chunk.jinfercept["server_calls"][0] for chunk in chunks if hasattr(chunk, "jinfercept")]
    assert [(call["name"], call["status"]) for call in told] == [("price", "running"), ("price", "ok"), ("price", "ok")]
    assert told[-1]["context"]["kept"] > 100
    assert chunks[-1].usage.completion_tokens == len("Let me see.\n" + asks("price", "lamp") + "It costs 23.") + 2


@pytest.mark.parametrize(
    ("name", "item", "status"),
    [
        ("price", "@@result-5f1c-0@@result-5f1c@@", "error"),
        ("@@result-5f1c-0@@result-5f1c@@", None, "unknown_tool"),
    ],
)
def test_no_call_imitates_the_mark_by_which_the_places_of_results_are_found(
    server: Running, scripted: Scripted, name: str, item: str | None, status: str
) -> None:
    says(scripted, server, asks(name, item), QUESTION)
    assert ask(server, QUESTION, max_tokens=200).jinfercept["server_calls"][0]["status"] == status


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_a_name_in_our_object_that_is_not_known_is_refused_with_the_nearest(server: Running, path: str) -> None:
    bodies = {
        "chat/completions": {"messages": QUESTION},
        "completions": {"prompt": "a"},
        "responses": {"input": "a", "max_output_tokens": 16},
    }
    body = {"model": "scripted", "max_tokens": 1, "temperature": 0, "nobody_knows": 1, **bodies[path]}
    answer = server.http.post(f"/v1/{path}", json=body | {"jinfercept": {"prioritty": 1}})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "jinfercept.prioritty", "unknown_parameter")
    assert "did you mean 'priority'?" in error["message"]
    assert server.http.post(f"/v1/{path}", json=body | {"jinfercept": {"priority": 1}}).status_code == 200


def test_tokens_and_their_probabilities_are_those_that_the_model_wrote(server: Running, scripted: Scripted) -> None:
    says(scripted, server, "It costs 23.", LAMP)
    wrote = "Let me see.\n" + asks("price", "lamp") + END + "It costs 23." + END
    done = ask(server, QUESTION, logprobs=True, extra_body=ALL | {"return_token_ids": True})
    [choice] = done.choices
    assert choice.token_ids == scripted.tokenizer.encode(wrote)
    assert "".join(logprob.token for logprob in choice.logprobs.content) == wrote


def test_without_the_flag_nothing_is_offered_and_by_name_only_what_is_named(
    server: Running, scripted: Scripted
) -> None:
    says(scripted, server, "23.", QUESTION, only=["price"])
    done = ask(server, QUESTION, extra_body={"jinfercept": {"server_tools": ["price"]}})
    assert done.choices[0].message.content == "23."
    assert ask(server, QUESTION, extra_body=None, max_tokens=1).usage.prompt_tokens < done.usage.prompt_tokens


@pytest.mark.parametrize(
    ("hints", "problem"),
    [
        ({"server_tools": ["sell"]}, "no server tool is named 'sell'; available: price, hang"),
        ({"server_tools": ["price"]}, "is in tools and in server_tools"),
        ({"server_tools": True, "max_rounds": 99}, "max_rounds must be at most 32; got 99"),
        ({"server_tools": "price"}, "server_tools"),
    ],
)
def test_what_cannot_be_meant_is_refused(server: Running, hints: Any, problem: str) -> None:
    own = {"type": "function", "function": {"name": "price"}}
    with pytest.raises(openai.BadRequestError, match=problem):
        ask(server, QUESTION, tools=[own], extra_body={"jinfercept": hints})


def test_a_server_without_tools_says_so(served: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="--tools FILE"):
        ask(served, QUESTION)


def test_of_two_tools_of_one_name_the_clients_is_called_by_the_client(server: Running, scripted: Scripted) -> None:
    own: Any = {"type": "function", "function": {"name": "price", "parameters": {"type": "object", "properties": {}}}}
    says(scripted, server, asks("price"), QUESTION, own=[own], only=["hang"])
    [call] = ask(server, QUESTION, tools=[own]).choices[0].message.tool_calls
    assert call.function.name == "price"


def test_a_file_that_is_not_there_is_said_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "no-such-model", "--port", "0", "--tools", "none.toml"]) == 2
    assert "none.toml" in capsys.readouterr().err


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text('def f() -> str:\n    """A tool."""\n    return ""\n')
    with (
        pytest.raises(ConfigError, match="two files have the same tool"),
        open_server_tools([str(tmp_path / "a.py"), str(tmp_path / "b.py")]),
    ):
        pass
