"""The names under which numbers are shown to Prometheus: vLLM's where the meaning is the same, `jinfercept:` for the others."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import NamedTuple

from prometheus_client.metrics_core import Metric

from jinfercept.meter.counts import Counts, ToolCounts
from jinfercept.meter.engine_stats import Pages
from jinfercept.sched.plan_builder import Counters
from jinfercept.server.engine_snapshot import SnapshotValue
from jinfercept.server.named import Named, Values


class Reading(NamedTuple):
    """An engine's numbers at one moment.

    Attributes:
        states: requests by state.
        token_bytes: of one token's keys and values.
        link_tokens_per_s: as the profile has it.
    """

    counts: Counts
    counters: Counters
    pages: Pages
    states: Mapping[str, int]
    page_size: int
    num_device_pages: int
    num_host_pages: int
    token_bytes: int
    link_tokens_per_s: int
    prefix_caching: bool


def families(look: SnapshotValue[Reading], model: str) -> Iterator[Metric]:
    """All metrics of one look.

    Args:
        model: for the label `model_name`.
    """
    reading, named = look.seen, Named(model)
    yield from _vllm(reading, named)
    yield from _vllm_requests(reading.counts, named)
    yield from _pool(reading, named)
    yield from _link(reading, named)
    yield from _steps(reading, named)
    yield from _tools(reading.counts.tools, named)
    age_s = time.monotonic() - look.at_s
    yield named.gauge("jinfercept:reading_age_seconds", "Age of these numbers; a long step holds them up", age_s)


def _vllm(reading: Reading, named: Named) -> Iterator[Metric]:
    """vLLM's names, of the engine."""
    counts, counters, states = reading.counts, reading.counters, reading.states
    usage = reading.pages.used / reading.num_device_pages
    config = {
        "block_size": reading.page_size,
        "num_gpu_blocks": reading.num_device_pages,
        "num_cpu_blocks": reading.num_host_pages,
        "enable_prefix_caching": reading.prefix_caching,
    }
    yield named.info("vllm:cache_config", "Sizes of the pools, in pages", config)
    yield named.gauge("vllm:num_requests_running", "Requests that run", states["running"])
    yield named.gauge("vllm:num_requests_waiting", "Requests that wait for their turn", states["waiting"])
    yield named.gauge("vllm:kv_cache_usage_perc", "Share of the device's pages that running requests use", usage)
    yield named.counter("vllm:prompt_tokens", "Tokens of prompts, cached ones included", counts.prompt)
    yield named.counter("vllm:generation_tokens", "Tokens that were generated", counts.generated)
    yield named.counter("vllm:prefix_cache_queries", "Tokens of prompts that were looked for", counts.prompt)
    yield named.counter("vllm:prefix_cache_hits", "Those of them that were not computed", counts.cached)
    yield named.counter("vllm:num_preemptions", "Running requests that had to give way", counters.preemptions)
    finished = {"stop": 0, "length": 0, "abort": 0, "error": 0} | counts.finished
    by_reason: Values = {(reason,): number for reason, number in finished.items()}
    yield named.counters("vllm:request_success", "Finished requests", by_reason, "finished_reason")
    yield named.histogram("vllm:iteration_tokens_total", "Query tokens of a step", counts.step_tokens)


def _vllm_requests(counts: Counts, named: Named) -> Iterator[Metric]:
    """vLLM's names, of requests."""
    prefix = "vllm:request_"
    for name, text, values in (
        ("vllm:time_to_first_token_seconds", "From arrival to the first token", counts.first_token_s),
        ("vllm:inter_token_latency_seconds", "Between tokens, pauses for calls left out", counts.token_s),
        ("vllm:e2e_request_latency_seconds", "From arrival to the end, pauses for calls included", counts.request_s),
        (f"{prefix}queue_time_seconds", "From arrival until it first ran", counts.queued_s),
        (f"{prefix}prefill_time_seconds", "From there to the first token", counts.prefill_s),
        (f"{prefix}decode_time_seconds", "From there to the end, pauses for calls left out", counts.decode_s),
        (f"{prefix}time_per_output_token_seconds", "A request's mean of that", counts.mean_token_s),
        (f"{prefix}prompt_tokens", "Tokens of a request's prompt", counts.request_prompt),
        (f"{prefix}generation_tokens", "Tokens that a request generated", counts.request_generated),
    ):
        yield named.histogram(name, text, values)


def _pool(reading: Reading, named: Named) -> Iterator[Metric]:
    """Requests by state, pages by residency, and what was wasted."""
    states: Values = {(state,): number for state, number in reading.states.items()}
    yield named.gauges(
        "jinfercept:requests", "Requests by state; kept: finished, a follow-up is expected", states, "state"
    )
    pages: Values = {(kind,): number for kind, number in reading.pages._asdict().items()}
    yield named.gauges("jinfercept:pages", "Pages by residency; host and host_free are the host's", pages, "residency")
    yield named.gauge("jinfercept:page_tokens", "Tokens of a page", reading.page_size)
    yield named.gauge("jinfercept:kv_bytes_per_token", "Keys and values of a token", reading.token_bytes)
    waste: Values = {(kind,): seconds for kind, seconds in asdict(reading.counts.waste).items()}
    text = "Device memory held without use, in token-seconds; times kv_bytes_per_token: byte-seconds"
    yield named.counters("jinfercept:waste_token_seconds", text, waste, "kind")
    yield named.counter("jinfercept:recomputed_tokens", "Computed once more", reading.counters.recomputed)


def _link(reading: Reading, named: Named) -> Iterator[Metric]:
    """What crossed the host link, and what could have."""
    counts, size = reading.counts, reading.token_bytes
    moved: Values = {("out",): counts.copied_out * size, ("in",): counts.copied_in * size}
    yield named.counters("jinfercept:link_bytes", "Over the host link, whole pages", moved, "direction")
    budget, rate = counts.link_budget * size, reading.link_tokens_per_s * size
    yield named.counter("jinfercept:link_budget_bytes", "What it could move in the time of the steps", budget)
    yield named.gauge("jinfercept:link_bytes_per_second", "What it moves, by the profile", rate)
    actions: Values = {(action, why): number for (action, why), number in counts.moved_pages.items()}
    yield named.counters(
        "jinfercept:moved_pages", "Pages of paused contexts by what was done", actions, "action", "why"
    )


def _steps(reading: Reading, named: Named) -> Iterator[Metric]:
    counts = reading.counts
    steps: Values = {(str(bucket),): number for bucket, number in counts.steps.items()}
    yield named.counters("jinfercept:steps", "Steps by bucket; 0: nothing but transfers", steps, "bucket")
    seconds: Values = {(str(bucket),): step_s for bucket, step_s in counts.step_s.items()}
    yield named.counters("jinfercept:step_seconds", "Seconds of steps by bucket", seconds, "bucket")


def _tools(tools: Mapping[str, ToolCounts], named: Named) -> Iterator[Metric]:
    """Interceptions by tool: those that the server runs, and fixed names for all others (`meter.interceptions`)."""
    begun: Values = {(name,): tool.begun for name, tool in tools.items()}
    yield named.counters(
        "jinfercept:interceptions", "InterceptionStats, by calls or by a finished answer", begun, "tool"
    )
    given_up: Values = {(name,): tool.given_up for name, tool in tools.items()}
    yield named.counters(
        "jinfercept:interceptions_given_up", "InterceptionStats that ended without a return", given_up, "tool"
    )
    results: Values = {
        (name, status): number for name, tool in tools.items() for status, number in tool.results.items()
    }
    yield named.counters("jinfercept:call_results", "Calls that the server ran, by outcome", results, "tool", "status")
    contexts: Values = {
        (name, what): number
        for name, tool in tools.items()
        for what, number in (("kept", tool.kept), ("copied_in", tool.copied_in), ("recomputed", tool.recomputed))
    }
    text = "Tokens of contexts that ran again, by what had been done with them"
    yield named.counters("jinfercept:interception_context_tokens", text, contexts, "tool", "context")
    durations = {(name,): tool.duration_s for name, tool in tools.items()}
    yield named.histograms("jinfercept:interception_seconds", "From a pause to its return", durations, "tool")
    resumes = {(name,): tool.resume_s for name, tool in tools.items()}
    yield named.histograms("jinfercept:resume_seconds", "From a return to the next token", resumes, "tool")
    expected: Values = {(name,): tool.predicted_s for name, tool in tools.items()}
    yield named.counters(
        "jinfercept:expected_interception_seconds", "As expected at the pause, added up", expected, "tool"
    )
    errors: Values = {(name,): tool.error_s for name, tool in tools.items()}
    text = "|expected - actual| of the same, added up; by the count of interception_seconds: the mean error"
    yield named.counters("jinfercept:estimate_error_seconds", text, errors, "tool")
