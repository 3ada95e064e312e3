"""Agents' sessions on real servers: prompts, replies, goodput, and servers that are started for a measurement."""

import asyncio
import json
from pathlib import Path
from random import Random

import pytest

from benchmarks.__main__ import main
from benchmarks.agents import AgentCall, prompts_of
from benchmarks.foreign import weka_session
from benchmarks.servers import Reply, child_server, complete, make_target
from jinfercept.errors import ConfigError
from jinfercept.sim import agent_sessions
from tests.support.chat_templates import QWEN
from tests.support.live_server import running
from tests.support.scripted_model import Make
from tests.support.tiny_model import GOLDEN


def test_sessions_are_written_as_aiperf_reads_them(tmp_path: Path) -> None:
    calls = [AgentCall(200, 5, 0, 0.0), AgentCall(300, 6, None, 1.5), AgentCall(150, 7, 128, 2.0)]
    (tmp_path / "0.json").write_text(json.dumps(weka_session(0, calls, "tiny")))
    [session] = agent_sessions.load_sessions(str(tmp_path))
    assert [(it.prompt, it.decode, it.kept, it.pause_s) for it in session.turns] == [
        (200, 5, 0, 0.0),
        (300, 6, 205, 1.5),
        (150, 7, 128, 2.0),
    ]


def test_a_prompt_goes_on_from_the_answer_or_from_what_the_history_kept() -> None:
    session = [AgentCall(5, 2, 0, 0.0), AgentCall(10, 2, None, 1.0), AgentCall(4, 2, 3, 1.0)]
    calls = prompts_of(session, Random(0))
    first, second, third = next(calls), calls.send([7, 8]), calls.send([9, 9])
    assert [prompt.known for prompt in (first, second, third)] == [0, 7, 3]
    first, second, third = first.tokens, second.tokens, third.tokens
    assert (len(first), second[:7], len(second)) == (5, [*first, 7, 8], 10)
    assert (third[:3], len(third)) == (second[:3], 4)


TINY = str(GOLDEN / "llama_gqa")
ENGINE = ["--dtype", "float32", "--page-size", "4", "--max-num-batched-tokens", "32", "--max-num-seqs", "8"]
ENGINE += ["--kv-tokens", "512", "--profile", "paper-gptj-6b-a100"]


def test_a_reply_has_the_tokens_and_the_counts_of_the_server_or_says_how_it_failed(make_scripted: Make) -> None:
    async def ask(url: str) -> list[Reply]:
        async with make_target(url, None, 60.0).client() as client:
            model = (await client.models.list()).data[0].id
            return [
                await complete(client, model, [5, 6, 7], 4),
                await complete(client, model, [5, 6, 7], -1),
                await complete(client, "no such model", [5, 6, 7], 4),
            ]

    with running(make_scripted(QWEN).llm) as server:
        reply, *failed = asyncio.run(ask(server.url))
    assert (reply.error, reply.prompt_tokens, reply.completion_tokens, len(reply.token_ids)) == (None, 3, 4, 4)
    assert reply.first_s is not None
    assert reply.sent_s + reply.first_s <= reply.end_s
    assert [reply.error for reply in failed] == ["HTTP 400", "HTTP 404"]


@pytest.mark.parametrize(
    ("text", "name", "url"),
    [
        ("http://a:8000", "a:8000", "http://a:8000/v1"),
        ("http://a/v1/", "a", "http://a/v1"),
        ("ours=https://a/openai/v1", "ours", "https://a/openai/v1"),
    ],
)
def test_a_server_is_a_url_with_or_without_a_name(text: str, name: str, url: str) -> None:
    assert make_target(text, None, 1.0)[:2] == (name, url)


def test_a_server_that_cannot_start_says_why() -> None:
    why = "the server did not start; got jinfercept serve: --kv-tokens takes a whole number"
    with pytest.raises(ConfigError, match=why), child_server(TINY, {"kv_tokens": "many", "check_pages": False}):
        pass


@pytest.mark.slow
def test_agents_are_measured_on_a_server_that_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.agents.VOCABULARY", 100)  # of a tiny model
    out = tmp_path / "out.json"
    scale = ["--scale-prompts", "0.001", "--scale-answers", "0.001", "--scale-seconds", "0"]
    assert main(["agents", TINY, "--json", str(out), *scale, *ENGINE]) == 0
    [report] = json.loads(out.read_text())
    assert (report["server"], report["calls"], report["errors"]) == ("jinfercept", 16 * 14, 0)


@pytest.mark.slow
def test_hints_are_compared_with_the_same_sessions_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "hints.json"
    assert main(["hints", "--duration", "0"]) == 2
    assert main(["hints", "--seeds", "1", "--duration", "120", "--json", str(file)]) == 0
    shown, runs = capsys.readouterr().out, json.loads(file.read_text())
    assert all(name.split(",")[0] in shown for name in runs)
    [plain], [expected] = (runs[name]["simulated"] for name in ("none", "jinfercept.expected_s"))
    assert plain == expected
    assert runs["priority"]["simulated"] != [plain]
