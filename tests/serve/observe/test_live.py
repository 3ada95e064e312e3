"""`/live` and the page at `/`: their content, their access rights, and that the page loads nothing else."""

import base64
import hashlib
import json
import re
import time
from typing import Any

from tests.support.engine_state import engine_state
from tests.support.live_server import END, Running, prompt_of, running, until
from tests.support.scripted_model import Scripted

TOOL: Any = {"type": "function", "function": {"name": "price", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "price", "arguments": {"item": "a secret"}}\n</tool_call>'
QUESTION: list[Any] = [{"role": "user", "content": "What does a private lamp cost?"}]


def ask_for_a_call(server: Running, scripted: Scripted, tool: Any = TOOL, call: str = CALL, **body: Any) -> None:
    scripted.follow(prompt_of(scripted, QUESTION, [tool]) + call + END)
    done = server.chat(messages=QUESTION, tools=[tool], max_tokens=200, **body).json()
    assert done["choices"][0]["finish_reason"] == "tool_calls"


def look(server: Running, key: str = "none") -> Any:
    """The current `/live`: answers are cached for a moment."""
    began_s, headers = time.monotonic(), {"authorization": f"Bearer {key}"}
    rows: list[Any] = []
    until(lambda: rows.append(server.http.get("/live", headers=headers).json()) or rows[-1]["now_s"] >= began_s)
    return rows[-1]


def test_a_context_that_waits_for_a_clients_tool_is_shown_with_its_price(served: Running, scripted: Scripted) -> None:
    ask_for_a_call(served, scripted, jinfercept={"session_id": "lamps"})
    live = look(served)
    assert served.http.get("/live").headers["cache-control"] == "no-store"
    assert (live["model"], live["policy"], live["draining"], live["inbox"]) == ("scripted", "copy_ahead", False, None)
    assert (live["devices"]["count"], live["disk"]) == (1, None)
    assert live["devices"]["kv_bytes"] == served.llm.memory_plan.kv_bytes
    assert live["counts"] == {"running": 0, "waiting": 0, "at_door": 0, "intercepted": 0, "retained": 1}
    [retained] = live["retained"]
    assert (retained["session"], retained["tool"], retained["tools"]) == ("lamps", "price", ["price"])
    assert retained["remaining_s"] >= 0 <= retained["age_s"]
    on_device = retained["dirty"] + retained["clean"]
    assert on_device + retained["host"] + retained["missing"] in (retained["tokens"], retained["tokens"] - 1)
    assert retained["price"]["per_s"] == on_device
    assert sum(live["sample"]["pages"][kind] for kind in ("free", "used", "claimed_dirty", "claimed_clean")) == 256
    assert live["history"][-1]["generated"] == live["sample"]["generated"] > 20
    assert not re.search("private|secret", json.dumps(live))


def test_of_the_history_only_what_is_new_is_told_again(served: Running, scripted: Scripted) -> None:
    scripted.follow()
    served.chat()
    served.wait_idle()
    since = look(served)["history"][-1]["at_s"]
    for after in (since, since - 1e-3):  # a later look within the second may replace the last sample
        history = served.http.get("/live", params={"since": after}).json()["history"]
        assert all(sample["at_s"] > after for sample in history)
        assert len(history) <= 2
    assert history
    for wrong in ("nan", "-1", "soon"):
        assert served.http.get("/live", params={"since": wrong}).status_code == 400


def test_what_was_said_is_shown_if_the_operator_wants_it(scripted: Scripted) -> None:
    with running(scripted.llm, show_texts=True) as server:
        ask_for_a_call(server, scripted)
        [retained] = look(server)["retained"]
        assert "a secret" in retained["text"]


def test_numbers_need_a_key_and_the_page_does_not(scripted: Scripted) -> None:
    with running(scripted.llm, api_key=("one",)) as server:
        assert server.http.get("/live").status_code == 401
        assert server.http.get("/live", headers={"authorization": "Bearer two"}).status_code == 401
        assert server.http.get("/live", headers={"authorization": "Bearer one"}).status_code == 200
        assert server.http.get("/").status_code == 200


def test_a_key_sees_its_own_requests_pauses_and_decisions_and_an_operator_sees_all(scripted: Scripted) -> None:
    own = {"running", "waiting", "intercepted", "retained"}
    other: Any = {"type": "function", "function": TOOL["function"] | {"name": "other"}}
    with running(scripted.llm, api_key=("one", "two", "three"), operator_key=("chief",), show_texts=True) as server:
        for key, tool, call in (("one", TOOL, CALL), ("two", other, CALL.replace("price", "other"))):
            server.http.headers["authorization"] = f"Bearer {key}"
            ask_for_a_call(server, scripted, tool, call)
        until(lambda: engine_state(server.llm).quiescent)
        seen = {key: look(server, key) for key in ("one", "two", "three", "chief")}
    assert {key: live["shows"] for key, live in seen.items()} == dict.fromkeys(("one", "two", "three"), "own") | {
        "chief": "all"
    }
    assert [seen[key]["counts"]["retained"] for key in seen] == [1, 1, 0, 2]
    for key, tool in (("one", "price"), ("two", "other")):
        [retained] = seen[key]["retained"]
        assert (retained["tools"], "secret" in retained["text"]) == ([tool], True)
        assert {decided["tool"] for decided in seen[key]["decisions"]} == {tool}
        assert {decided["request"] for decided in seen[key]["decisions"]} == {retained["request"]}
    assert {decided["tool"] for decided in seen["chief"]["decisions"]} == {"price", "other"}
    stranger = {name: value for name, value in seen["three"].items() if name not in own}
    assert stranger["decisions"] == []
    assert [seen["three"][name] for name in own] == [[]] * 4
    assert not re.search("chatcmpl|price|other|secret", json.dumps(seen["three"]))
    assert stranger["sample"]["pages"] == seen["chief"]["sample"]["pages"]


def test_the_page_is_one_file_that_runs_its_own_script_and_asks_nobody_else(served: Running) -> None:
    answer = served.http.get("/")
    page, policy = answer.text, answer.headers["content-security-policy"]
    assert answer.headers["content-type"].startswith("text/html")
    for tag in ("script", "style"):
        [own] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"https?://|//[a-z]|@import|\bsrc=|<iframe|<object", page)
    assert not re.search(r"\s(on\w+|style)=", page)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(", page)
