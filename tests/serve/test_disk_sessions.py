"""A conversation goes on after a restart of its server, with its context from disk."""

from pathlib import Path
from typing import Any

import httpx2
import pytest

from jinfercept.kv.disk import DiskSpeed
from tests.support.chat_templates import QWEN
from tests.support.live_server import Running, running
from tests.support.scripted_model import scripted_llm


def answer(server: Running, messages: list[dict[str, Any]]) -> dict[str, Any]:
    response = server.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8, "temperature": 0})
    assert response.status_code == httpx2.codes.OK
    return response.json()


def metric(server: Running, name: str, label: str = "") -> float:
    lines = server.http.get("/metrics").text.splitlines()
    [value] = [line.split()[-1] for line in lines if line.startswith(f"jinfercept:{name}{{") and label in line]
    return float(value)


def test_a_conversation_goes_on_after_a_restart_of_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = DiskSpeed(1e9, 1e9, 1e-4)  # a busy machine measures a slow disk, from which nothing is worth reading
    monkeypatch.setattr("jinfercept.kv.disk.measure_speed", lambda *arguments: fast)
    for module in ("engine", "disk_contexts"):
        monkeypatch.setattr(f"jinfercept.engine.{module}.CLOSE_S", 60.0)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Tell me of the sea. " * 20}]
    flags = {"swap_space": 0.001, "kv_disk": str(tmp_path / "kv"), "kv_disk_space": 0.01}
    num_known = 0
    for is_again in (False, True):
        with scripted_llm(1024, **flags) as make, running(make(QWEN).llm) as server:
            body = answer(server, messages)
            usage = body["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == num_known
            assert (metric(server, "disk_bytes_total", 'what="read"') > 0) is is_again
            assert metric(server, "disk_up") == 1
            disk = server.http.get("/live").json()["disk"]
            assert disk["works"]
            assert (disk["read_bytes"] > 0) is is_again
            assert 0 < disk["used_bytes"] <= disk["total_bytes"]
            messages += [body["choices"][0]["message"], {"role": "user", "content": "And of the sky?"}]
            num_known = (usage["total_tokens"] - 1) // 16 * 16
