"""Scripted streams with asynchronous calls: what a stream must become, and a dispatcher that answers at given tokens."""

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from jinfercept.calls import Call, Result, Tool
from jinfercept.chat.call_markup import AsyncCalls, ContextMarkup
from jinfercept.chat.parsers.cml import Delimiters
from jinfercept.chat.text_stream import TextStream
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.engine.dispatcher import Clock
from jinfercept.engine.engine import Engine
from jinfercept.hooks import TrapFrame
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.policy import Policy
from jinfercept.sched.sequence import Sequence, State
from tests.support.fake_engine import ManualClock, make_engine, next_token
from tests.support.sample_tokenizers import byte_backend, ended

MERGES = [("]", "["), ("D", "]"), ("Ġ", "["), ("[", "C"), ("(", ")"), ("E", "N"), ("EN", "D]")]
"""Tokens that span delimiters and their neighbours."""
TOOLS = {name: Tool(str, name=name) for name in ("f", "g")}
PROMPT = (7, 11, 13)


@cache
def ascii_tokenizer(special: bool) -> Tokenizer:
    """A token for each printable ASCII character and for `MERGES`, and `<end>`; the delimiters as tokens too if `special`."""
    characters = [chr(code) for code in range(33, 127)]
    return ended(byte_backend(MERGES, ["<end>", *(Delimiters() if special else ())], alphabet=["Ġ", *characters]))


def make_markup(special: bool, **options: object) -> ContextMarkup:
    """The markup of a stream that may call `TOOLS`."""
    tokenizer = ascii_tokenizer(special)
    parameters = {name: ["n"] for name in TOOLS}
    return ContextMarkup(AsyncCalls(**options), TOOLS, parameters, tokenizer)  # pyright: ignore


class Returns(NamedTuple):
    """A call returns once its request has generated so many tokens, those in flight included, or while it is trapped."""

    generated: int
    text: str


class ReturnsAtTokens:
    """CallDispatcher that answer each call when its request has generated so many tokens; in a trap, one call at each poll.

    Args:
        clock: of the engine.
        returns: by id of the call; others never return.
        trapped_polls: polls that a trap lasts at least.
    """

    def __init__(self, clock: Clock, returns: Mapping[str, Returns], trapped_polls: int = 1) -> None:
        self.clock, self.returns, self.trapped_polls = clock, returns, trapped_polls
        self.engine: Engine | None = None
        self.started: dict[str, tuple[str, Call]] = {}
        self.log: list[str] = []
        self._polls = 0

    def call(self, request_id: str, calls: tuple[Call, ...], tools: Mapping[str, Tool], tenant: str) -> None:
        raise AssertionError("no call pauses here")

    def poll(self) -> list[tuple[str, tuple[Result, ...]]]:
        return []

    def start(self, request_id: str, call: Call, tools: Mapping[str, Tool], tenant: str) -> None:
        assert call.id not in self.started
        self.started[call.id] = request_id, call
        self.log.append(f"start {call.id}")

    def poll_started(self) -> list[tuple[str, Call, Result]]:
        done = []
        for call_id, (request_id, call) in list(self.started.items()):
            back, sequence = self.returns.get(call_id), self._sequence(request_id)
            if back is None or not self._is_due(sequence, back):
                continue
            del self.started[call_id]
            done.append((request_id, call, Result(back.text, duration_s=0.5)))
            self.log.append(f"return {call_id}")
            if sequence.state is State.INTERCEPTED:
                break
        return done

    def next_s(self) -> float | None:
        return self.clock.now() + 0.01 if self.started else None

    def cancel(self, request_id: str) -> None:
        gone = [call_id for call_id, (owner, _) in self.started.items() if owner == request_id]
        for call_id in gone:
            del self.started[call_id]
            self.log.append(f"cancel {call_id}")

    def _is_due(self, sequence: Sequence, back: Returns) -> bool:
        if sequence.state is State.INTERCEPTED:
            self._polls += 1
            return self._polls % self.trapped_polls == 0
        return sequence.generated + sequence.pending >= back.generated

    def _sequence(self, request_id: str) -> Sequence:
        assert self.engine is not None
        return next(sequence for sequence in self.engine.scheduler.unfinished if sequence.id == request_id)


def async_engine(
    policy: Policy, special: bool, returns: Mapping[str, Returns], trapped_polls: int = 1, **options: object
) -> tuple[Engine, ReturnsAtTokens]:
    """An engine on a fake runner, whose requests' calls return at given tokens."""
    tokenizer, clock = ascii_tokenizer(special), ManualClock()
    dispatcher = ReturnsAtTokens(clock, returns, trapped_polls)
    engine = make_engine(
        policy,
        clock=clock,
        dispatcher=dispatcher,
        eos_token_ids=tuple(tokenizer.eos_token_ids),
        open_text=lambda request: TextStream(tokenizer, tuple(request.params.stop or ()), False, False),
        vocab_size=tokenizer.vocab_size,
        **options,  # pyright: ignore[reportArgumentType]
    )
    dispatcher.engine = engine
    return engine, dispatcher


def async_request(
    markup: ContextMarkup, script: list[int], free: int = 3, name: str = "a", **params: object
) -> Request:
    """A request that generates a script, and then so many tokens that the model chooses."""
    most = len(script) + free
    sampling = SamplingParams(temperature=0, max_tokens=most, forced_output_ids=script, **params)  # pyright: ignore
    return Request(name, PROMPT, sampling, TOOLS, markup=markup)


def expected_stream(
    markup: ContextMarkup,
    tokenizer: Tokenizer,
    script: list[int],
    free: int,
    returns: Mapping[str, Returns],
    depth: int,
) -> list[int]:
    """What the stream must be, by the rule of `engine.async_calls`, worked out without an engine.

    In a trap, calls return in the order in which they were made. At depth 1 a call is found one token late, and cannot return
    before that.
    """
    context: list[int] = [*PROMPT]
    watch, generated, trapped = markup.watch("", ()), 0, False
    pending: list[Call] = []
    queue: list[tuple[Call, Result]] = []

    def inject() -> bool:
        """Append what is queued; False if nothing is or the place is not clean."""
        if not queue or not watch.clean:
            return False
        for call, result in queue:
            context.extend(markup.interrupt(call, result, 10_000)[0])
        queue.clear()
        return True

    def take_due() -> None:
        due = [call for call in pending if returns[call.id].generated <= generated]
        queue.extend((call, Result(returns[call.id].text)) for call in due)
        pending[:] = [call for call in pending if call not in due]

    while True:
        token = script[generated] if generated < len(script) else next_token(context)
        context.append(token)
        generated += 1
        if generated == len(script) + free:
            return context[len(PROMPT) :]
        calls: list[Call] = []
        for item in watch.feed(len(context) - len(PROMPT) - 1, token, tokenizer.token_text(token)):
            if isinstance(item, Call):
                calls.append(item)
            elif isinstance(item, TrapFrame):
                trapped = True
            else:
                queue.append((Call("", "", id=item.id), Result(f"error: {item.problem}", "error")))
        take_due()
        void = inject()  # the sample in flight
        pending += calls
        if trapped and watch.clean:
            trapped = False
            queue += [(call, Result(returns[call.id].text)) for call in pending]
            pending.clear()
        elif depth == 0 or void:
            take_due()
        inject()
