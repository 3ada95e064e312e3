"""`RolloutMethods`: how an `LLM` samples for a trainer, and the streams of groups whose samples have ended."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple, Self, Unpack, final

from jinfercept.chat.chats import is_conversation
from jinfercept.chat.memory import GivenTokens
from jinfercept.chat.messages import checked_message, results_behind_calls
from jinfercept.chat.options import ChatArguments, prompt_options
from jinfercept.chat.request_maker import RequestMaker
from jinfercept.chat.turn_grammars import PerTurnGrammar
from jinfercept.engine.parallel_sampling import with_prompt_experts
from jinfercept.engine.streaming import AsyncStream, Stream
from jinfercept.engine.thread import EngineThread
from jinfercept.errors import RequestError, shown
from jinfercept.hooks import Detector
from jinfercept.outputs import RequestOutput
from jinfercept.request import Request
from jinfercept.rollouts.samples import Rollout, Rollouts, sample_of
from jinfercept.sampling_params import SamplingParams
from jinfercept.start.served_engine import ServedEngine
from jinfercept.values import plain
from jinfercept.vllm_names import check_arguments


class Planned(NamedTuple):
    """A sample that is to be made."""

    prompt: int  # place among the prompts
    request: Request | None  # makes the sample; None: the sample exists already
    sample: Rollout | None = None  # the existing sample, or the sample that the request continues
    conversation: tuple[Mapping[str, object], ...] = ()  # messages of a chat before the answer

    def ended(self, output: RequestOutput | None) -> Rollout:
        """Return the sample, given the output of its request."""
        if self.request is None:
            assert self.sample is not None
            return self.sample
        assert output is not None
        return sample_of(self.prompt, self.request, output, self.sample, self.conversation)


class Groups:
    """The groups of planned samples, which end in any order."""

    def __init__(self, planned: Sequence[Planned], pad_id: int) -> None:
        self._planned, self._empty = planned, Rollouts((), pad_id)
        self.requests = [item.request for item in planned if item.request is not None]
        self._open = dict[int, set[str]]()
        for item in planned:
            ids = self._open.setdefault(item.prompt, set())
            if item.request is not None:
                ids.add(item.request.id)
        self._prompts = {item.request.id: item.prompt for item in planned if item.request is not None}
        self._complete = deque(prompt for prompt, ids in self._open.items() if not ids)

    def ids_of(self, prompt: int) -> list[str]:
        """List the requests of a group that have not ended. Raises `RequestError` if there is no such group."""
        if type(plain(prompt)) is not int or prompt not in self._open:
            raise RequestError("there is no such group", got=shown(prompt), fix=f"one of {sorted(self._open)[:20]}")
        return sorted(self._open[prompt])

    def take(self, request_id: str) -> None:
        """Note that a request has ended."""
        ids = self._open[prompt := self._prompts[request_id]]
        ids.discard(request_id)
        if not ids:
            self._complete.append(prompt)

    def next(self, outputs: Mapping[str, RequestOutput]) -> Rollouts | None:
        """Return the next complete group, each once; None if no group is complete."""
        if not self._complete:
            return None
        prompt = self._complete.popleft()
        return self._made([item for item in self._planned if item.prompt == prompt], outputs)

    def all(self, outputs: Mapping[str, RequestOutput]) -> Rollouts:
        return self._made(self._planned, outputs)

    def _made(self, planned: Sequence[Planned], outputs: Mapping[str, RequestOutput]) -> Rollouts:
        outputs = with_prompt_experts((item.request for item in planned if item.request is not None), outputs)
        samples = [item.ended(outputs[item.request.id] if item.request is not None else None) for item in planned]
        return self._empty + samples


@final
class RolloutStream(AbstractContextManager["RolloutStream"]):
    """Iterates over groups as `Rollouts`, each when its last sample has ended.

    For one thread; closing it aborts open groups.
    """

    def __init__(self, thread: EngineThread, groups: Groups) -> None:
        self._groups, self._thread = groups, thread
        self._stream = Stream(thread, groups.requests, ends_only=True)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Rollouts:
        while (group := self._groups.next(self._stream.outputs)) is None:
            self._groups.take(next(self._stream).request_id)
        return group

    def abort_group(self, prompt: int) -> None:
        """End the samples of a prompt now, from any thread.

        Their group is yielded as far as it got, and may be continued later.
        """
        self._thread.abort(self._groups.ids_of(prompt))

    def abort(self) -> None:
        """End all samples now. Their groups are yielded as far as they got."""
        self._stream.abort()

    def result(self) -> Rollouts:
        """Wait for the last sample and return all of them, in the order of the prompts."""
        for _ in self:
            pass
        return self._groups.all(self._stream.outputs)

    def close(self) -> None:
        """End all samples that have not ended, and yield no more groups."""
        self._stream.close()

    def __exit__(self, *error: object) -> None:
        self.close()


@final
class AsyncRolloutStream(AbstractAsyncContextManager["AsyncRolloutStream"]):
    """`RolloutStream` for an event loop. Cancelling the task that iterates aborts the samples."""

    def __init__(self, thread: EngineThread, groups: Groups) -> None:
        self._groups, self._thread = groups, thread
        self._stream = AsyncStream(thread, groups.requests, ends_only=True)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Rollouts:
        while (group := self._groups.next(self._stream.outputs)) is None:
            self._groups.take((await anext(self._stream)).request_id)
        return group

    def abort_group(self, prompt: int) -> None:
        self._thread.abort(self._groups.ids_of(prompt))

    def abort(self) -> None:
        self._stream.abort()

    async def result(self) -> Rollouts:
        async for _ in self:
            pass
        return self._groups.all(self._stream.outputs)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


Following = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""What is put behind a sample: messages where it is a chat, else a text or token ids."""


class RolloutOptions(ChatArguments, total=False):
    """Keyword arguments of `rollout` and its other forms, beside those of `chat`.

    Attributes:
        n: samples of each prompt (default: 1). Greedy sampling allows only 1.
        tools, detector: as of `generate` and `chat`.
        following: appended to each of the given `Rollouts`, one for each or one for all: messages for chats, else a text or
            token ids.
        pad_id: fills the end of `Rollouts.token_ids` (default: 0).
    """

    n: int
    tools: Iterable[Any] | None
    detector: Detector | Iterable[Detector | None] | None
    following: Following | Sequence[Following] | None
    pad_id: int


class RolloutMethods:
    """The part of `LLM` for reinforcement learning, see `docs/rollouts.md`."""

    engine: ServedEngine
    _requests: RequestMaker

    def rollout(
        self,
        prompts: Any,
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        on_group: Callable[[Rollouts], None] | None = None,
        **options: Unpack[RolloutOptions],
    ) -> Rollouts:
        """Sample prompts or conversations, with their tools, and return arrays for a trainer.

        The samples of a prompt are a group. They share the pages of the prompt, and each has its own random numbers, which
        `SamplingParams.seed` fixes. No token is tokenised again: a later turn continues the tokens that the model wrote.

        Args:
            prompts: as of `generate`, or conversations as of `chat`, or `Rollouts`. With `following`, each of these samples
                continues after that. Without it, the partial samples go on, with their tools, options and pending calls; the
                others are returned as they are (if none is partial, leave out `params`).
            params: one for all, or one for each prompt; None: as of `generate` and `chat`.
            on_group: called on this thread with each group when its last sample has ended.

        Returns:
            The samples, in the order of the prompts.

        Raises:
            RequestError: as `generate` and `chat`; then nothing is started.
            EngineError: as `generate`.
        """
        if on_group is not None and not callable(on_group):
            raise RequestError("on_group must be a function", got=shown(on_group), fix="give a function")
        with RolloutStream(self.engine.thread, planned(self._requests, prompts, params, options)) as stream:
            for group in stream:
                if on_group is not None:
                    on_group(group)
            return stream.result()

    async def arollout(
        self,
        prompts: Any,
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        **options: Unpack[RolloutOptions],
    ) -> Rollouts:
        """Run `rollout` without blocking the event loop. Cancelling it aborts the samples."""
        async with AsyncRolloutStream(self.engine.thread, planned(self._requests, prompts, params, options)) as stream:
            return await stream.result()

    def rollout_stream(
        self,
        prompts: Any,
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        **options: Unpack[RolloutOptions],
    ) -> RolloutStream:
        """Yield the groups of `rollout` one by one, each when its last sample has ended. `abort_group` ends a group early."""
        return RolloutStream(self.engine.thread, planned(self._requests, prompts, params, options))

    def arollout_stream(
        self,
        prompts: Any,
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        **options: Unpack[RolloutOptions],
    ) -> AsyncRolloutStream:
        """Like `rollout_stream`, for `async for`."""
        return AsyncRolloutStream(self.engine.thread, planned(self._requests, prompts, params, options))


def planned(
    maker: RequestMaker, prompts: Any, params: SamplingParams | Iterable[SamplingParams] | None, given: RolloutOptions
) -> Groups:
    """Plan the samples of `RolloutMethods.rollout`, with the requests that make them."""
    options: Any = dict(given)
    n, pad_id = plain(options.pop("n", 1)), options.pop("pad_id", 0)
    if type(n) is not int:
        raise RequestError("n is a whole number", got=shown(n), fix="say how many samples each prompt has")
    tools, detector, following = (options.pop(name, None) for name in ("tools", "detector", "following"))
    if isinstance(prompts, Rollout):
        prompts = Rollouts([prompts])
    if not isinstance(prompts, Rollouts):
        if following is not None:
            raise RequestError(
                "following is allowed only with samples", got=shown(following), fix="give Rollouts first"
            )
        conversations = [prompts] if is_conversation(prompts) else prompts
        is_chat = (
            isinstance(conversations, list | tuple) and bool(conversations) and all(map(is_conversation, conversations))
        )
        default = maker.default_params(is_chat=is_chat)
        reporting = _reporting(default if params is None else params, n)
        items = (_chats if is_chat else _prompts)(maker, conversations, reporting, tools, detector, options)
    elif following is None:
        items = _continued(maker, prompts, params, n, (tools, detector, options))
    elif n != 1:
        raise RequestError("continued samples need n=1", got=f"n={n}", fix="n=1, or give a sample several times")
    else:
        items = _followed(maker, prompts, params, tools, detector, following, options)
    return Groups([*map(_reporting_kept, items)], pad_id)


def _prompts(
    maker: RequestMaker, prompts: Any, params: Any, tools: Any, detector: Any, options: ChatArguments
) -> list[Planned]:
    requests = maker.make_requests(prompts, params, tools, detector, **_own_options(options))
    return [*map(Planned, _places(requests), requests)]


def _own_options(options: ChatArguments) -> dict[str, Any]:
    own = prompt_options(options)
    names = ("prompts", "params", "on_group", *RolloutOptions.__annotations__)
    check_arguments("a rollout has no such option", options, names, SamplingParams.__slots__)
    return own


def _chats(
    maker: RequestMaker, conversations: Any, params: Any, tools: Any, detector: Any, options: ChatArguments
) -> list[Planned]:
    if detector is not None:
        raise RequestError("a chat takes no detector", got="a detector", fix="name a tool_call_parser")
    requests = maker.make_chats(conversations, params, tools, options)
    placed = zip(_places(requests), requests, strict=True)
    return [Planned(place, request, conversation=tuple(conversations[place])) for place, request in placed]


def _places(requests: Sequence[Request]) -> list[int]:
    places, place = list[int](), -1
    for request in requests:
        # a prompt's outputs are consecutive requests, and the first has the index 0
        place += request.index == 0
        places.append(place)
    return places


def _continued(maker: RequestMaker, samples: Rollouts, params: Any, n: int, options: tuple[Any, ...]) -> list[Planned]:
    if n != 1 or any(options):
        what = "a partial sample goes on with the tools and options that it had"
        raise RequestError(what, got="n, tools, detector or options", fix="leave them out; or give `following`")
    if params is not None and not samples.is_partial:
        raise RequestError("no sample is partial", got=f"{samples!r} with params", fix="say what follows: `following`")
    items = list[Planned]()
    for sample in samples:
        if not sample.is_partial:
            items.append(Planned(sample.prompt, None, sample))
            continue
        origin = sample.origin
        pauses = () if origin is None else origin.output.interceptions
        if origin is None or any(result.status == "started" for pause in pauses for result in pause.results):
            got = "a sample that was pickled" if origin is None else "a chat that went on beside a call"
            raise RequestError("this partial sample cannot be continued", got=got, fix="sample its prompt again")
        own = origin.request.params if params is None else _reporting(params, 1)
        if not isinstance(own, SamplingParams):
            raise RequestError("samples continue with one SamplingParams", got=shown(params), fix="leave params out")
        grammar = origin.request.grammar
        adapter = origin.request.adapter
        request = replace(
            maker.with_adapter(origin.request, adapter and adapter.name),
            id=maker.next_id(),
            params=own,
            leader=None,
            grammar=grammar.anew() if isinstance(grammar, PerTurnGrammar) else grammar,
            continues=origin.output,
        )
        items.append(Planned(sample.prompt, request, origin.before, origin.conversation))
    return items


def _followed(
    maker: RequestMaker,
    samples: Rollouts,
    params: Any,
    tools: Any,
    detector: Any,
    following: Any,
    options: ChatArguments,
) -> list[Planned]:
    items = list[Planned]()
    for sample, put in zip(samples, _one_each(following, len(samples)), strict=True):
        default = maker.default_params(is_chat=bool(sample.conversation))
        reporting = _reporting(default if params is None else params, 1)
        if sample.conversation:
            if not is_conversation(put):
                raise RequestError("what follows a chat must be messages", got=shown(put), fix='[{"role": "user", …}]')
            *before, turn = sample.conversation
            conversation = (*before, *results_behind_calls((turn, *put), checked_message))
            tokens = GivenTokens(sample.token_ids.tolist(), len(sample.conversation))
            [request] = maker.make_chats([conversation], reporting, tools, options, tokens=tokens)
            items.append(Planned(sample.prompt, request, sample, conversation))
            continue
        if isinstance(put, str):
            if maker.tokenizer is None:
                raise RequestError("a model without a tokenizer cannot read text", got=shown(put), fix="give token ids")
            put = maker.tokenizer.encode(put)
        if not isinstance(put, list | tuple):
            raise RequestError("following must be a text or token ids", got=shown(put), fix="give one of them")
        prompt = {"prompt_token_ids": [*sample.token_ids.tolist(), *put]}
        [request] = maker.make_requests([prompt], reporting, tools, detector, **_own_options(options))
        items.append(Planned(sample.prompt, request, sample))
    return items


def _one_each(following: Any, count: int) -> Sequence[Any]:
    following = plain(following)
    is_single = isinstance(following, str) or is_conversation(following)
    if is_single or (isinstance(following, list | tuple) and all(isinstance(item, int) for item in following)):
        return [following] * count
    if not isinstance(following, list | tuple) or len(following) != count:
        got = f"{len(following)} of them" if isinstance(following, list | tuple) else shown(following)
        fix = "a text, a list of token ids or, behind chats, of messages; or a list of one for each"
        raise RequestError(f"following must have one entry for each of {count} samples", got=got, fix=fix)
    return following


def _reporting(params: Any, n: int) -> Any:
    if not isinstance(params, SamplingParams):
        if not isinstance(params, Iterable) or isinstance(params, str | Mapping):
            return params  # refused where requests are made
        return [_reporting(each, n) if isinstance(each, SamplingParams) else each for each in params]
    if n != 1 and params.n != 1:
        raise RequestError("n is given twice", got=f"n={n} and SamplingParams(n={params.n})", fix="leave one out")
    # a trainer needs the probability of each drawn token, by the logits and by the distribution that it was drawn from
    n = params.n if n == 1 else n
    return replace(params, n=n, logprobs=params.logprobs or 0, return_processed_logprobs=True)


def _reporting_kept(item: Planned) -> Planned:
    if (request := item.request) is None:
        return item
    params = request.params
    # the tokens that could be drawn are reported only where something cuts the distributions
    cut = params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    cut = cut or bool(params.allowed_token_ids or params.bad_words or params.bad_words_token_ids or params.min_tokens)
    if not cut and request.grammar is None:
        return item
    return item._replace(request=replace(request, params=replace(params, return_kept_tokens=True)))
