"""A policy of your own: of the paused contexts, evict first the one that is expected back last.

`python examples/own_policy.py` simulates it beside the built-in `lru`. Any command takes it by its place:
`jinfercept simulate --policy examples/own_policy.py:LastBackFirst --estimator history`.
"""

from collections.abc import Iterator
from random import Random

from jinfercept.sched.estimator import remaining_s
from jinfercept.sched.named_profiles import PROFILES
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.policy import Action, Move, Policy
from jinfercept.sched.sequence import Sequence, State
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.workload import arrivals, draw


class LastBackFirst(Policy):
    """Evicts the context that is expected back last, tail first, to the host as far as the link has time."""

    def __init__(self, inputs: PolicyInputs) -> None:
        self.estimator = inputs.estimator
        self.paused: dict[str, Sequence] = {}

    def pause(self, sequence: Sequence, now: float) -> None:
        self.paused[sequence.id] = sequence

    def resume(self, sequence: Sequence, now: float) -> None:
        self.paused.pop(sequence.id, None)

    def victims(self, now: float) -> Iterator[Move]:
        for sequence in sorted(self.paused.values(), key=lambda paused: -self.rest_s(paused, now)):
            yield Move(sequence, sequence.context.tail_first, Action.SWAP, "expected back last")

    def rest_s(self, sequence: Sequence, now: float) -> float:
        """Expected seconds until a sequence can run: none once its calls have returned."""
        waits = sequence.state is not State.INTERCEPTED
        return 0.0 if waits else remaining_s(self.estimator, sequence, now - sequence.paused_s)


def main(duration_s: float = 100.0) -> dict[str, float]:
    """Mean latency in ms per token by policy, of two requests a second in a pool of 16,000 tokens."""
    latencies: dict[str, float] = {}
    for policy in ("lru", LastBackFirst):
        rng = Random(0)
        requests = arrivals(lambda rng=rng: draw("mixed", rng), 2.0, duration_s, rng)
        simulation = Simulation(PROFILES["paper-gptj-6b-a100"], policy, "history", duration_s, kv_tokens=16_000)
        report = simulation.run(requests)
        name, latency = report["policy"], report["normalized_latency_paper_ms_per_token"]["mean"]
        latencies[name] = latency
        print(f"{name:14} {latency:.2f} ms/token, {report['recomputed_tokens']} recomputed")
    return latencies


if __name__ == "__main__":
    main()
