"""The load client against the real server: tokens that it counts, contexts that it finds again, and servers that it starts."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main as benchmarks
from jinfercept.bench.servers import child_server
from jinfercept.cli.main import main
from jinfercept.errors import ConfigError
from tests.support.chat_templates import QWEN
from tests.support.live_server import running
from tests.support.scripted_model import Make
from tests.support.tiny_model import GOLDEN

TINY = str(GOLDEN / "llama_gqa")
ENGINE = ["--dtype", "float32", "--page-size", "4", "--max-num-batched-tokens", "32", "--max-num-seqs", "8"]
ENGINE += ["--kv-tokens", "512", "--profile", "paper-gptj-6b-a100"]
LENGTHS = ["--prompt-tokens", "30", "--tool-tokens", "8", "--new-tokens", "4", "--token-ids", "100"]


def test_a_session_finds_its_context_again_on_the_real_server(make_scripted: Make, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with running(make_scripted(QWEN).llm) as server:
        flags = ["--base-url", server.url, "--sessions", "2", "--turns", "3", "--concurrent", "--json", str(out)]
        assert main(["bench", "sessions", *flags, *LENGTHS]) == 0
    [report] = json.loads(out.read_text())
    assert [turn["prompt_tokens"] for turn in report["rounds"]] == [60, 84, 108]
    assert report["later_turns"]["cached_share"] > 0.5


def test_a_chat_of_words_is_answered_by_the_real_server(make_scripted: Make, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    scripted = make_scripted(QWEN)
    with running(scripted.llm) as server:
        flags = [
            "--base-url",
            server.url,
            "--sessions",
            "2",
            "--turns",
            "1",
            "--prompt-tokens",
            "4",
            "--system-tokens",
            "3",
        ]
        assert benchmarks(["load", *flags, "--new-tokens", "3", "--json", str(out)]) == 0
    [report] = json.loads(out.read_text())
    assert (report["sessions_completed"], report["completion_tokens"], report["errors"]) == (2, 6, {})


def test_a_server_that_cannot_start_says_why() -> None:
    why = "the server did not start; got jinfercept serve: Error parsing --kv-tokens: invalid literal"
    with pytest.raises(ConfigError, match=why), child_server(TINY, {"kv_tokens": "many", "check_pages": False}):
        pass


@pytest.mark.slow
def test_sessions_are_measured_on_a_server_that_is_started_for_it(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["bench", "sessions", TINY, "--sessions", "1,2", "--json", str(out), *LENGTHS, *ENGINE]) == 0
    assert [load["sessions"] for load in json.loads(out.read_text())] == [1, 2]


@pytest.mark.slow
def test_http_is_measured_beside_the_offline_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    flags = [
        "--offline",
        "--concurrency",
        "4",
        "--system-tokens",
        "4",
        "--json",
        str(out),
        "--plot",
        str(tmp_path / "out.png"),
    ]
    assert benchmarks(["load", TINY, *flags, *LENGTHS, *ENGINE]) == 0
    report = json.loads(out.read_text())
    assert len(report["waves"]) == 4
    assert report["ratio"] == pytest.approx(report["http_tokens_per_s"] / report["offline_tokens_per_s"])
    assert "all" in capsys.readouterr().out
