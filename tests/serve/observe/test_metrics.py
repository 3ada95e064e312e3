"""`/metrics`: Prometheus parses it, and it agrees with the answers to clients."""

import re
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jinfercept.engine.meter.engine_stats import EngineStats
from jinfercept.request import FollowUp
from jinfercept.serve.observe import metrics as server_metrics
from tests.support.gate import Gate
from tests.support.live_server import END, MODEL, Running, prompt_of, running
from tests.support.scripted_model import Scripted
from tests.support.tool_server import BUY, QUESTION, ask, asks, says

Labels = tuple[tuple[str, str], ...]

VLLM = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:iteration_tokens_total_bucket",
    "vllm:cache_config_info",
}
TOOL: Any = {"type": "function", "function": {"name": "price", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "price", "arguments": {"item": "a secret"}}\n</tool_call>'


def samples(text: str) -> dict[str, dict[Labels, float]]:
    """Values by name and labels, without the label `model_name`."""
    values: defaultdict[str, dict[Labels, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == MODEL
            values[sample.name][tuple(sorted(sample.labels.items()))] = sample.value
    return values


def scrape(served: Running) -> dict[str, dict[Labels, float]]:
    return samples(served.http.get("/metrics").text)


def test_vllms_names_are_there_and_count_what_clients_were_told(served: Running, scripted: Scripted) -> None:
    scripted.follow()
    body = {"prompt": "Hi, whoever you are, and all of you", "max_tokens": 6, "ignore_eos": True}
    usage = [served.http.post("/v1/completions", json=body).json()["usage"] for _ in range(3)]
    values = scrape(served)
    assert set(values) >= VLLM
    assert values["vllm:prompt_tokens_total"][()] == sum(usage_of_one["prompt_tokens"] for usage_of_one in usage)
    assert (
        values["vllm:generation_tokens_total"][()]
        == sum(usage_of_one["completion_tokens"] for usage_of_one in usage)
        == 18
    )
    cached = sum(usage_of_one["prompt_tokens_details"]["cached_tokens"] for usage_of_one in usage)
    assert values["vllm:prefix_cache_hits_total"][()] == cached > 0
    assert values["vllm:request_success_total"][(("finished_reason", "length"),)] == 3
    assert values["vllm:time_to_first_token_seconds_count"][()] == 3
    assert values["vllm:inter_token_latency_seconds_count"][()] == 15
    assert values["vllm:request_generation_tokens_sum"][()] == 18
    [config] = values["vllm:cache_config_info"]
    assert dict(config)["num_gpu_blocks"] == "256"
    states = {dict(labels)["state"]: number for labels, number in values["jinfercept:requests"].items()}
    assert set(states) == {"running", "waiting", "at_door", "intercepted", "retained"}
    pages = {dict(labels)["residency"]: number for labels, number in values["jinfercept:pages"].items()}
    device = ("free", "used", "claimed_dirty", "claimed_clean", "cached")
    assert sum(pages[kind] for kind in device) == 256
    assert sum(values["jinfercept:steps_total"].values()) == values["vllm:iteration_tokens_total_count"][()] + (
        values["jinfercept:steps_total"].get((("bucket", "0"),), 0)
    )


def test_a_clients_call_is_an_interception_by_the_tools_of_clients(served: Running, scripted: Scripted) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is it?"}]
    prompt = prompt_of(scripted, messages, [TOOL])
    scripted.follow(prompt + CALL + END)
    choice = served.chat(messages=messages, tools=[TOOL], max_tokens=200).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    tool = (("tool", "<client>"),)
    values = scrape(served)
    assert values["jinfercept:requests"][(("state", "retained"),)] == 1
    assert values["jinfercept:interceptions_total"][tool] == 1
    call = choice["message"]["tool_calls"][0]
    messages += [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "23"}]
    scripted.follow(prompt_of(scripted, messages, [TOOL]) + "It is 23." + END)
    served.chat(messages=messages, tools=[TOOL], max_tokens=200)
    text = served.http.get("/metrics").text
    values = samples(text)
    assert values["jinfercept:interception_seconds_count"][tool] == 1
    assert values["jinfercept:resume_seconds_count"][tool] == 1
    assert values["jinfercept:interception_context_tokens_total"][(("context", "kept"), *tool)] > 20
    assert values["jinfercept:estimate_error_seconds_total"][tool] > 0
    assert values["jinfercept:waste_token_seconds_total"][(("kind", "preserve"),)] > 0
    assert not re.search("secret|price", text)


def test_numbers_are_read_while_others_are_served_and_counters_never_fall(
    served: Running, scripted: Scripted, gate: Gate
) -> None:
    scripted.follow()
    body = {"prompt": "Hi", "max_tokens": 150, "ignore_eos": True, "n": 4}
    asking = threading.Thread(target=served.http.post, args=("/v1/completions",), kwargs={"json": body})
    asking.start()
    before: dict[tuple[str, Labels], float] = {}
    running_seen = 0.0
    while asking.is_alive():
        metrics = scrape(served)
        pages = metrics["jinfercept:pages"]
        assert sum(number for labels, number in pages.items() if "host" not in labels[0][1]) == 256
        running_seen = max(running_seen, metrics["vllm:num_requests_running"][()])
        if running_seen > 1:
            gate.open()
        for name, values in metrics.items():
            if name.endswith(("_total", "_count", "_bucket")):
                for labels, value in values.items():
                    assert value >= before.get((name, labels), 0.0), name
                    before[name, labels] = value
    asking.join()
    assert running_seen > 1


def test_prometheus_needs_no_key(scripted: Scripted) -> None:
    with running(scripted.llm, api_key=("one",)) as server:
        assert server.http.get("/v1/models").status_code == 401
        page = server.http.get("/metrics")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        document = server.http.get("/openapi.json", headers={"authorization": "Bearer one"}).json()
        assert document["paths"]["/metrics"]["get"]["responses"]["200"]


def labels_of(served: Running) -> set[tuple[str, str]]:
    return {label for values in scrape(served).values() for labels in values for label in labels if label[0] != "le"}


def test_no_client_and_no_model_chooses_a_label_or_uses_them_up(server: Running, scripted: Scripted) -> None:
    for number in range(3):
        says(scripted, server, asks(f"unheard{number}"), QUESTION)
        ask(server, QUESTION, max_tokens=len(asks("unheard0")) + 3)
        own = {"type": "function", "function": BUY["function"] | {"name": f"clients{number}"}}
        says(scripted, server, asks(f"clients{number}", "lamp"), QUESTION, own=[own])
        assert ask(server, QUESTION, tools=[own]).choices[0].finish_reason == "tool_calls"
    mixed = asks("price", "lamp") + asks("unheard", "lamp") + asks("buy", "lamp")
    says(scripted, server, mixed, QUESTION, own=[BUY])
    assert ask(server, QUESTION, tools=[BUY]).choices[0].finish_reason == "tool_calls"
    results = scrape(server)["jinfercept:call_results_total"]
    assert results[(("status", "ok"), ("tool", "price"))] >= 1
    assert results[(("status", "unknown_tool"), ("tool", "<unknown>"))] >= 1
    tools = {value for label, value in labels_of(server) if label == "tool"}
    fixed = {"<client>", "<unknown>", "<several>", FollowUp().reader}
    assert {"<client>", "<unknown>"} <= tools <= fixed | {"price", "hang"}
    assert not [value for _, value in labels_of(server) if re.search("clients|unheard|buy", value)]


@pytest.mark.parametrize("name", ["</script>", 'a"b\\c\n', "x" * 5000])
def test_whatever_a_tool_is_called_the_format_holds(served: Running, scripted: Scripted, name: str) -> None:
    scripted.follow()
    body = {"max_tokens": 2, "ignore_eos": True, "jinfercept": {"session_id": name[:200]}}
    assert served.chat(**body).status_code == 200

    def rename(stats: EngineStats) -> None:
        stats.counts.tools[name] = stats.counts.tools[FollowUp().reader]

    served.llm.engine.ask(rename).result(60)
    assert scrape(served)["jinfercept:interceptions_total"][(("tool", name),)] >= 1


def test_a_page_is_encoded_once_a_while_however_many_ask(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jinfercept.serve.observe.metrics._FRESH_S", 60.0)
    encoded: list[int] = []
    was = server_metrics.collect
    monkeypatch.setattr(server_metrics, "collect", lambda *args: encoded.append(1) or was(*args))
    with running(scripted.llm) as server, ThreadPoolExecutor(8) as pool:
        pages = set(pool.map(lambda _: server.http.get("/metrics").text, range(40)))
    assert (len(encoded), len(pages)) == (1, 1)
