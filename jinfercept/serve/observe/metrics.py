"""`/metrics` for Prometheus. Needs no key, as in vLLM: it has numbers and the names of the server's own tools, no data of
requests and no name that a client chooses. A metric with the meaning of one of vLLM's has its name.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, final

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from jinfercept.engine.meter.counts import Histogram, ToolCounts
from jinfercept.engine.state import EngineState
from jinfercept.kv.disk import DiskState
from jinfercept.llm import LLM
from jinfercept.serve.protocols.errors import ApiError
from jinfercept.serve.service import Service

_TIMEOUT_S = 2.0
"""Seconds to wait for the end of a step before the previous value is returned."""


class SnapshotValue[T](NamedTuple):
    """A value of the engine, and the monotonic time at which it was read."""

    seen: T
    at_s: float


@final
class EngineSnapshot[T]:
    """The last answer to one question about an engine, which comes between two of its steps.

    An answer is given again for `fresh_s` seconds.
    """

    def __init__(self, ask: Callable[[], Future[T]], fresh_s: float = 0.0) -> None:
        self._ask, self._fresh_s = ask, fresh_s
        self._reading: asyncio.Future[Any] | None = None
        self._last: SnapshotValue[T] | None = None

    async def look(self) -> SnapshotValue[T]:
        """The current value, or the last one if a step takes longer than `_TIMEOUT_S`. Raises `ApiError` 503 without any."""
        last = self._last
        if last is not None and time.monotonic() - last.at_s < self._fresh_s:
            return last
        if self._reading is None or self._reading.done():
            self._reading = asyncio.wrap_future(self._ask())
        question = self._reading
        await asyncio.wait([question], timeout=_TIMEOUT_S)
        if question.done():
            self._last = SnapshotValue(question.result(), time.monotonic())
        if self._last is None:
            raise ApiError(503, "the engine is busy with a long step", code="busy", headers={"Retry-After": "1"})
        return self._last


class MetricFamilies(NamedTuple):
    """Makes metric families of one value, or of several by the values of further labels: a tuple for several labels.

    `model` is the value of the label `model_name`.
    """

    model: str

    def gauge(self, name: str, text: str, values: float | Mapping[Any, float], *labels: str) -> Metric:
        """A value that rises and falls."""
        return self._filled(GaugeMetricFamily(name, text, labels=["model_name", *labels]), values)

    def counter(self, name: str, text: str, values: float | Mapping[Any, float], *labels: str) -> Metric:
        """A value that only rises; its name gets the suffix `_total`."""
        return self._filled(CounterMetricFamily(name, text, labels=["model_name", *labels]), values)

    def histogram(self, name: str, text: str, values: Histogram | Mapping[Any, Histogram], *labels: str) -> Metric:
        """A histogram with the buckets of the engine's own."""
        family = HistogramMetricFamily(name, text, labels=["model_name", *labels])
        for key, histogram in self._keyed(values):
            buckets = [(floatToGoString(bound), count) for bound, count in histogram.cumulative]
            family.add_metric(key, buckets, histogram.total)
        return family

    def info(self, name: str, text: str, values: Mapping[str, object]) -> Metric:
        """Constants as labels; the name gets the suffix `_info`."""
        family = InfoMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self.model], {key: str(value) for key, value in values.items()})
        return family

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, values: float | Mapping[Any, float]) -> Metric:
        for key, value in self._keyed(values):
            family.add_metric(key, value)
        return family

    def _keyed(self, values: Any) -> Iterator[tuple[list[str], Any]]:
        for key, value in (values if isinstance(values, Mapping) else {(): values}).items():
            yield [self.model, *(map(str, key) if isinstance(key, tuple) else (str(key),))], value


_FRESH_S = 1.0
"""Seconds for which an encoded page is reused: encoding takes milliseconds, and needs no key."""
REFUSALS = (
    "queue_full",
    "overloaded",
    "concurrency_limit_exceeded",
    "rate_limit_exceeded",
    "too_many_background_responses",
)
"""Codes of errors with status 429."""


def collect(service: Service, looked: SnapshotValue[EngineState]) -> list[Metric]:
    """All metrics of a service. Runs on its event loop."""
    state, make, llm = looked.seen, MetricFamilies(service.names[0]), service.llm
    counts, disk = state.counts, llm.disk
    pending = sum(limit.number for limit in list(service.pending_calls.values()))
    refused = {**dict.fromkeys(REFUSALS, 0), **service.refused}
    within = {"yes": counts.turns[True], "no": counts.turns[False]}
    counter, gauge, histogram = make.counter, make.gauge, make.histogram
    metrics = [
        *_vllm(state, make),
        *_pool(state, make, llm),
        *_link(state, make, llm),
        *(_disk(disk, make) if disk is not None else ()),
        counter("jinfercept:steps", "Steps by token bucket; 0: transfers only", counts.steps, "bucket"),
        counter("jinfercept:step_seconds", "Seconds of steps by token bucket", counts.step_s, "bucket"),
        gauge("jinfercept:pending_calls", "Asynchronous calls that run", pending),
        gauge("jinfercept:sleeping", "1 while the engine sleeps or is paused", int(llm.is_sleeping)),
        counter("jinfercept:refused_requests", "Answers of status 429, by the code of the error", refused, "code"),
        histogram(
            "jinfercept:turn_delay_seconds",
            "Seconds from the submission of a turn (arrival of a request, return of its calls) to its first token, once inside",
            counts.turn_delay_s,
        ),
        histogram(
            "jinfercept:door_seconds",
            "Seconds that new conversations waited at the door, of those that did",
            counts.door_s,
        ),
        counter(
            "jinfercept:turns",
            "Turns that have ended, by whether their delay and their seconds per token stayed within the limits of goodput",
            within,
            "within_limits",
        ),
        *_tools(counts.tools, make),
        gauge(
            "jinfercept:reading_age_seconds",
            "Age of these numbers; they wait for the end of a step",
            time.monotonic() - looked.at_s,
        ),
        gauge("jinfercept:tasks", "Tasks of the server's event loop", len(asyncio.all_tasks())),
    ]
    config = {
        "block_size": llm.shape.page_size,
        "num_gpu_blocks": state.num_device_pages,
        "num_cpu_blocks": state.num_host_pages,
        "enable_prefix_caching": llm.config.cache.enable_prefix_caching,
    }
    constants = make.info("vllm:cache_config", "Page size in tokens and pool sizes in pages, as labels", config)
    return [constants, *metrics]


def _vllm(state: EngineState, make: MetricFamilies) -> list[Metric]:
    counter, gauge, histogram = make.counter, make.gauge, make.histogram
    counts, counters, accepted = state.counts, state.counters, state.counters.accepted
    usage = state.pages.used / state.num_device_pages
    by_place = dict(sorted(accepted.items()))
    finished = {"stop": 0, "length": 0, "abort": 0, "error": 0} | counts.finished
    drafts = "vllm:spec_decode_num"
    return [
        gauge("vllm:num_requests_running", "Running requests", state.num_running),
        gauge("vllm:num_requests_waiting", "Waiting requests", state.num_waiting),
        gauge("vllm:kv_cache_usage_perc", "Fraction of the device pages that running requests use", usage),
        counter("vllm:prompt_tokens", "Prompt tokens, cached tokens included", counts.prompt),
        counter("vllm:generation_tokens", "Generated tokens", counts.generated),
        counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", counts.prompt),
        counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", counts.cached),
        counter("vllm:num_preemptions", "Preemptions of running requests", counters.preemptions),
        counter(f"{drafts}_drafts", "Steps of a request with drafts", counters.drafts),
        counter(f"{drafts}_draft_tokens", "Drafted tokens", counters.drafted),
        counter(f"{drafts}_accepted_tokens", "Drafted tokens that became tokens", accepted.total()),
        counter(
            f"{drafts}_accepted_tokens_per_pos",
            "The same by place among the drafts of a step, from 0",
            by_place,
            "position",
        ),
        counter("vllm:request_success", "Finished requests", finished, "finished_reason"),
        histogram("vllm:iteration_tokens_total", "Query tokens per step", counts.step_tokens),
        histogram(
            "vllm:time_to_first_token_seconds",
            "Seconds from arrival to the first token",
            counts.first_token_s,
        ),
        histogram(
            "vllm:inter_token_latency_seconds",
            "Seconds between tokens, pauses for calls excluded",
            counts.token_s,
        ),
        histogram(
            "vllm:e2e_request_latency_seconds",
            "Seconds from arrival to the end, pauses for calls included",
            counts.request_s,
        ),
        histogram(
            "vllm:request_queue_time_seconds",
            "Seconds from arrival until the request first runs",
            counts.queued_s,
        ),
        histogram(
            "vllm:request_prefill_time_seconds",
            "Seconds from the first run to the first token",
            counts.prefill_s,
        ),
        histogram(
            "vllm:request_decode_time_seconds",
            "Seconds from the first token to the end, pauses for calls excluded",
            counts.decode_s,
        ),
        histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean decode seconds per token of a request",
            counts.mean_token_s,
        ),
        histogram("vllm:request_prompt_tokens", "Prompt tokens per request", counts.request_prompt),
        histogram("vllm:request_generation_tokens", "Generated tokens per request", counts.request_generated),
    ]


def _pool(state: EngineState, make: MetricFamilies, llm: LLM) -> list[Metric]:
    counter, gauge, plan, page_size = make.counter, make.gauge, llm.memory_plan, llm.shape.page_size
    states = {
        "running": state.num_running,
        "waiting": state.num_waiting - state.num_at_door,
        "at_door": state.num_at_door,
        "intercepted": state.num_intercepted,
        "retained": state.num_retained,
    }
    pools = (
        (
            "jinfercept:window_pages",
            "Device pages of layers with a window, where these have a pool of their own, by use",
            state.window_pages,
        ),
        ("jinfercept:state_slots", "Device slots for states of recurrent layers, by use", state.state_slots),
    )
    return [
        gauge(
            "jinfercept:requests",
            "Requests by state; at_door: new conversations that wait for others; retained: finished, the context is retained "
            "for a follow-up request",
            states,
            "state",
        ),
        gauge(
            "jinfercept:pages",
            "Pages by residency; host and host_free are host pages, all others device pages",
            state.pages._asdict(),
            "residency",
        ),
        *(gauge(name, text, pool._asdict(), "use") for name, text, pool in pools if pool is not None),
        gauge(
            "jinfercept:kv_bytes_per_token",
            "Bytes of keys and values per token, on all devices together",
            plan.token_bytes(page_size),
        ),
        counter(
            "jinfercept:waste_token_seconds",
            "Token-seconds of device memory held without use; multiply by kv_bytes_per_token for byte-seconds",
            asdict(state.counts.waste),
            "kind",
        ),
        counter(
            "jinfercept:recomputed_tokens",
            "Tokens whose keys and values were computed again",
            state.counters.recomputed,
        ),
    ]


def _link(state: EngineState, make: MetricFamilies, llm: LLM) -> list[Metric]:
    counts, size, counter = state.counts, llm.memory_plan.token_bytes(llm.shape.page_size), make.counter
    moved = {"out": counts.copied_out * size, "in": counts.copied_in * size}
    budget = counts.link_budget * size
    return [
        counter("jinfercept:link_bytes", "Bytes copied over the host link, in whole pages", moved, "direction"),
        counter(
            "jinfercept:link_budget_bytes",
            "Bytes that the host link could have copied in one direction while steps ran",
            budget,
        ),
        make.gauge(
            "jinfercept:link_bytes_per_second",
            "Bandwidth of the host link in one direction, from the profile",
            llm.profile.link_tokens(1.0) * size,
        ),
        counter(
            "jinfercept:moved_pages",
            "Pages of paused contexts by the action of the policy and its reason",
            counts.moved_pages,
            "action",
            "why",
        ),
    ]


def _disk(disk: DiskState, make: MetricFamilies) -> list[Metric]:
    counters, used, counter, gauge = disk.counters, disk.occupancy, make.counter, make.gauge
    space = {"used": used.used_bytes, "free": used.total_bytes - used.used_bytes}
    moved = {"read": counters.read_bytes, "written": counters.written_bytes}
    lost = {"evicted": counters.evicted_pages, "damaged": counters.damaged_pages}
    return [
        gauge("jinfercept:disk_up", "1 while contexts are stored, 0 after a failure", int(disk.works)),
        gauge("jinfercept:disk_space_bytes", "Space of contexts on disk", space, "kind"),
        counter(
            "jinfercept:disk_bytes",
            "Bytes of contexts by what became of them; refused: they were not written, to spare the drive",
            moved,
            "what",
        ),
        counter("jinfercept:disk_lost_pages", "Pages that are no longer on disk, by the reason", lost, "why"),
        counter("jinfercept:disk_failures", "Writes of contexts that failed", counters.failures),
    ]


def _tools(tools: Mapping[str, ToolCounts], make: MetricFamilies) -> list[Metric]:
    """Interceptions by tool: the server's tools by name, all others under fixed names (`meter.interceptions`)."""

    def by_tool(kind: Callable[..., Metric], name: str, text: str, values: Mapping[Any, Any], *labels: str) -> Metric:
        return kind(f"jinfercept:{name}", text, values, "tool", *labels)

    counter, histogram = partial(by_tool, make.counter), partial(by_tool, make.histogram)

    def each(field: str) -> dict[str, Any]:
        return {name: getattr(tool, field) for name, tool in tools.items()}

    results = {(name, status): number for name, tool in tools.items() for status, number in tool.results.items()}
    contexts = {
        (name, what): getattr(tool, what)
        for name, tool in tools.items()
        for what in ("kept", "copied_in", "recomputed")
    }
    return [
        counter("interceptions", "Pauses, by calls or at a finished answer", each("begun")),
        counter(
            "interceptions_given_up",
            "Pauses that ended without a result or a follow-up request",
            each("given_up"),
        ),
        counter("call_results", "Calls that the server ran, by status", results, "status"),
        counter(
            "interception_context_tokens",
            "Tokens of contexts that resumed, by whether they were preserved, copied in or recomputed",
            contexts,
            "context",
        ),
        histogram(
            "interception_seconds",
            "Seconds from a pause to its results or its follow-up request",
            each("duration_s"),
        ),
        histogram(
            "resume_seconds",
            "Seconds from the results or the follow-up request to the next token",
            each("resume_s"),
        ),
        counter(
            "estimate_error_seconds",
            "Sum of |predicted - actual| pause durations; divide by interception_seconds_count for the mean",
            each("error_s"),
        ),
    ]


@final
class MetricsPage:
    """The page of metrics, encoded once a second at most."""

    def __init__(self, collected: Callable[[], Awaitable[list[Metric]]]) -> None:
        self._collected, self._lock = collected, asyncio.Lock()
        self._page, self._encoded_s = b"", -math.inf  # on the monotonic clock

    async def response(self) -> Response:
        async with self._lock:  # one request encodes it for all that wait
            if time.monotonic() - self._encoded_s >= _FRESH_S:
                metrics = await self._collected()
                registry: Any = SimpleNamespace(collect=lambda: metrics)
                self._page = generate_latest(registry)
                self._encoded_s = time.monotonic()
        return Response(self._page, media_type=CONTENT_TYPE_PLAIN_0_0_4)


def metrics_router(service: Service) -> APIRouter:
    """Router of one service. Uses no global registry."""
    router = APIRouter(tags=["operations"])
    window = EngineSnapshot(service.llm.engine.snapshot)
    text: Any = {"text/plain": {"schema": {"type": "string"}}}

    async def collected() -> list[Metric]:
        return collect(service, await window.look())

    page = MetricsPage(collected)

    @router.get("/metrics", response_class=Response, responses={200: {"content": text}})
    async def metrics() -> Response:
        """Counts, times and pages, for Prometheus."""
        return await page.response()

    return router
