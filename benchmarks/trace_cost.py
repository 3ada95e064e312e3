"""What traces cost: µs of the counting in a decode step, by how many of its requests are traced, and µs of the spans of one.

The spans are those of a chat that calls one tool, made when the request has ended, on the event loop; their export is another
thread's. Times are of the processor, the least of several rounds.

    python benchmarks/trace_cost.py [--sequences 64]
"""

import argparse
import time
from collections.abc import Callable

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rich.console import Console
from rich.table import Table

from jinfercept.kv.manager import KVManager
from jinfercept.meter.engine_stats import EngineStats
from jinfercept.meter.request_log import RequestLog
from jinfercept.meter.timelines import Phase, Timeline, Timelines
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.estimator import HistoryEstimator
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sched.plan import Chunk, StepPlan, StepResult
from jinfercept.sched.plan_builder import PlannedStep, Row
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.sequence import Sequence, State
from jinfercept.server.observe.tracing.request_trace import RequestTrace, Tracing

PAGE_SIZE = 16
ROUNDS, STEPS, TRACES = 20, 200, 100


def least_us(work: Callable[[], object], number: int) -> float:
    """Microseconds of the processor for one call: the least mean of several rounds."""
    rounds: list[float] = []
    for _ in range(ROUNDS):
        began_s = time.process_time()
        for _ in range(number):
            work()
        rounds.append((time.process_time() - began_s) / number)
    return 1e6 * min(rounds)


def decode_step(num_sequences: int, num_traced: int) -> float:
    """Microseconds that counting takes in a step in which every sequence decodes."""
    profile = load_profile("paper-gptj-6b-a100")
    inputs = PolicyInputs(profile, profile.saturation, PAGE_SIZE, HistoryEstimator())
    kv = KVManager(num_sequences, 0, PAGE_SIZE)
    log = RequestLog(time.monotonic)
    stats = EngineStats(log, kv, inputs, synchronous=False)
    sequences = [Sequence(f"{number}", [1, 2, 3], kv.open(""), max_tokens=10) for number in range(num_sequences)]
    stats.timelines = Timelines()
    stats.timelines.add({sequence.id: Timeline() for sequence in sequences[:num_traced]})
    for sequence in sequences:
        for state in (State.WAITING, State.RUNNING):
            sequence.state = state
            log.changed(sequence)
    chunks = tuple(Chunk(slot, 2, (3,), (), None) for slot in range(num_sequences))
    plan = StepPlan(number=1, bucket=num_sequences, chunks=chunks, offload=(), fetch=(), drop=())
    planned = PlannedStep(
        plan, tuple(Row(sequence, sequence.epoch, place) for place, sequence in enumerate(sequences)), (), 0
    )
    result = StepResult((1,) * num_sequences, 0.01)
    return least_us(lambda: log.stepped(planned, result), STEPS)


def one_trace(*, sampled: bool) -> float:
    """Microseconds of one request's trace: its beginning, one call and its spans."""
    provider = TracerProvider(shutdown_on_exit=False)
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider, lambda timeout_s: provider.shutdown())
    request = Request("chatcmpl-1", (1, 2, 3), SamplingParams())
    flags = b"01" if sampled else b"00"
    headers = [(b"traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-" + flags)]
    kinds = ("queue", "prefill", "decode", "pause", "queue", "prefill", "decode", "pause", "prefill", "decode")

    def trace() -> None:
        request_trace: RequestTrace = tracing.begin("chat", "/v1/chat/completions", headers, {"prompt_tokens": 3})
        request_trace.name_model("model", "model")
        if (timelines := request_trace.attach([request])) is not None:
            timelines.open[request.id].phases += [Phase(kind, 1.0, 2.0) for kind in kinds]
        request_trace.begin_call(request.id, "price", "call-1", "{}").end()
        request_trace.release(200)
        exporter.clear()

    return least_us(trace, TRACES)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64, help="sequences that decode in a step")
    number = parser.parse_args().sequences
    table = Table("what", "µs")
    for name, traced in (("none is", 0), ("one is", 1), ("all are", number)):
        table.add_row(f"counting in a decode step of {number}, {name} traced", f"{decode_step(number, traced):.1f}")
    table.add_row("a request that is not sampled", f"{one_trace(sampled=False):.0f}")
    table.add_row("a request with 10 phases and a call", f"{one_trace(sampled=True):.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
