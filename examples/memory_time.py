"""The order by predicted memory·time (LAMPS, arXiv 2410.18248): who will hold little memory for a short time goes first.

Any command takes it by its place: `jinfercept simulate --order examples/memory_time.py:MemoryTime`.

What is known of a waiting request: the tokens it has and where their KV is, its tenant, the tool that it called last, and how
turns and pauses of earlier requests went that began alike. The lengths of its turns, the calls between them and their seconds
are predicted. `max_tokens` is not read: clients set it far too high, and where it is exact, as in a simulation, it would be
knowledge of the future. The estimator of durations is not asked either: it predicts calls in flight, and these are to come.
"""

from collections import deque
from typing import NamedTuple, final

from jinfercept.sched.estimator import recent
from jinfercept.sched.orders import Order
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.sequence import Sequence, State

MOST_GROUPS = 256
"""Histories of turns that are kept; beyond them the one least recently used is dropped."""

RING = 64
"""Turns, and pauses, that a history keeps."""


class TurnGroup(NamedTuple):
    """Turns that begin alike: with the same tenant, the same tool called last ("" if none was) and a prompt of as many bits."""

    tenant: str
    tool: str
    prompt_bits: int

    @classmethod
    def of(cls, sequence: Sequence) -> "TurnGroup":
        """The group of the turn that a sequence is in."""
        tool = sequence.calls[0].name if sequence.calls else ""
        return cls(sequence.tenant, tool, sequence.external_spans[0][1].bit_length())


class _OpenTurn(NamedTuple):
    """A turn of an unfinished sequence, which had generated `begun` tokens before."""

    group: TurnGroup
    begun: int


class TurnForecast(NamedTuple):
    """What is expected of the rest of a turn.

    Attributes:
        tokens, squared: mean and mean square of the tokens that are still generated.
        calls: probability that the turn ends in a call, not in the end of its request.
    """

    tokens: float
    squared: float
    calls: float

    def held(self, context: float, step_s: float) -> float:
        """Token·seconds of decoding: `t·(C·E[g] + E[g²]/2)`."""
        return step_s * (context * self.tokens + self.squared / 2)


@final
class TurnHistory:
    """The last turns of one group, and the last pauses before such turns.

    Attributes:
        tool: that a turn of the group has called last; None if none did.
    """

    __slots__ = ("_ends", "_pauses_s", "_whole", "tool")

    def __init__(self) -> None:
        self.tool: str | None = None
        self._ends: deque[tuple[int, bool]] = deque(maxlen=RING)
        self._pauses_s: deque[float] = deque(maxlen=RING)
        self._whole: TurnForecast | None = None  # of a turn that begins

    def add(self, tokens: int, tool: str | None) -> None:
        """A turn has generated so many tokens and called a tool; None: and was the last."""
        self._ends.append((tokens, tool is not None))
        self.tool, self._whole = tool or self.tool, None

    def add_pause(self, seconds: float) -> None:
        """A pause has lasted so long before a turn."""
        self._pauses_s.append(seconds)

    @property
    def pause_s(self) -> float:
        """Mean seconds of a pause before a turn."""
        return sum(self._pauses_s) / (len(self._pauses_s) or 1)

    def rest(self, done: int) -> TurnForecast | None:
        """Of a turn that has generated `done` tokens; None if no turn was longer.

        One turn more than were seen counts as one that ends its request, so that `calls` is below 1.
        """
        if done == 0 and self._whole is not None:
            return self._whole
        longer = [(tokens - done, calls) for tokens, calls in self._ends if tokens > done]
        if not longer:
            return None
        count, calls = len(longer), sum([calls for _, calls in longer])
        total, squared = sum([tokens for tokens, _ in longer]), sum([tokens * tokens for tokens, _ in longer])
        forecast = TurnForecast(total / count, squared / count, calls / (count + 1))
        if done == 0:
            self._whole = forecast
        return forecast


@final
class MemoryTime(Order):
    """Ascending token·seconds that a request will still hold on the device until it ends.

    The sum of: loading or computing the KV that it lacks; the rest of its turn, `t·(C·E[g] + E[g²]/2)` for a context of C
    tokens, g tokens to generate and t seconds of a full step; and, times the probability of a call, the pause and the turns
    after it. A pause costs the least of holding the context, moving it out and back, and recomputing it: InferCept's
    equation (5) for the request's own memory. After each of the later turns, which all are like the one after the call, another
    call follows with the same probability p: `1 / (1 - p)` turns are expected.

    A turn that outlasts all of its group is like one of any group that lasted longer; if there is none, it is expected to last
    as long again. Tokens that calls return are not predicted. Memory is bounded by `MOST_GROUPS`.

    Args:
        inputs: prices and saturation point.
    """

    def __init__(self, inputs: PolicyInputs) -> None:
        self._inputs = inputs
        self._step_s = inputs.forward_s(inputs.saturation)
        self._turns: dict[str, _OpenTurn] = {}  # of unfinished sequences that have waited in their turn
        self._histories: dict[TurnGroup, TurnHistory] = {}
        self._all = TurnHistory()

    def key(self, sequence: Sequence, now: float) -> float:
        """Token·seconds; see the class."""
        turn = self._turns.get(sequence.id) or self._begin(sequence, now)
        done = sequence.generated - turn.begun
        history = self._histories.get(turn.group)
        rest = (history and history.rest(done)) or self._all.rest(done) or TurnForecast(done, done * done, 0.0)
        token_s = self._load(sequence) + rest.held(sequence.length, self._step_s)
        if history is not None and history.tool is not None:
            after = turn.group._replace(tool=history.tool)
            token_s += rest.calls * self._later(after, sequence.length + rest.tokens)
        return token_s

    def intercepted(self, sequence: Sequence) -> None:
        self._end(sequence, sequence.calls[0].name if sequence.calls else None)

    def finished(self, sequence: Sequence) -> None:
        self._end(sequence, None)

    def _begin(self, sequence: Sequence, now: float) -> _OpenTurn:
        turn = self._turns[sequence.id] = _OpenTurn(TurnGroup.of(sequence), sequence.generated)
        if sequence.calls:
            self._history(turn.group).add_pause(now - sequence.paused_s)
        return turn

    def _end(self, sequence: Sequence, tool: str | None) -> None:
        """A turn ends; one that ends while its sequence waits was aborted, and says nothing."""
        turn = self._turns.pop(sequence.id, None)
        if turn is not None and sequence.state is State.RUNNING:
            for history in (self._history(turn.group), self._all):
                history.add(sequence.generated - turn.begun, tool)

    def _history(self, group: TurnGroup) -> TurnHistory:
        return recent(self._histories, group, TurnHistory, MOST_GROUPS)

    def _load(self, sequence: Sequence) -> float:
        """Token·seconds until the whole context is on the device, where it grows from what is there now."""
        context = sequence.length
        device, host, missing = sequence.context.residency(context)
        seconds = missing / self._inputs.saturation * self._step_s
        if host:
            seconds += self._inputs.cost.swap_s(host)
        return seconds * (device + context) / 2

    def _later(self, group: TurnGroup, context: float) -> float:
        """Token·seconds of a pause and of all turns and pauses after it.

        Args:
            group: of the turn after the pause.
            context: tokens at the pause.
        """
        history = self._histories.get(group)
        whole = history and history.rest(0)
        if history is None or whole is None:
            return 0.0
        turns = 1.0 / (1.0 - whole.calls)
        mean_context = context + whole.tokens * (turns - 1.0)
        pauses = self._pause(history, context) + (turns - 1.0) * self._pause(history, mean_context)
        return pauses + turns * whole.held(mean_context, self._step_s)

    def _pause(self, history: TurnHistory, context: float) -> float:
        """Token·seconds that a pause costs, handled in the cheapest way."""
        cost, tokens = self._inputs.cost, round(context)
        swap_s, recompute_s = 2.0 * cost.swap_s(tokens), cost.recompute_s(tokens, self._inputs.saturation)
        return tokens * min(history.pause_s, swap_s, recompute_s / 2)
