"""Serves the requests of rollouts, and yields each group when all its samples have ended."""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import NamedTuple, Self, final

from jinfercept.engine.parallel_sampling import with_prompt_experts
from jinfercept.engine.streaming import AsyncStream, Stream
from jinfercept.engine.thread import EngineThread
from jinfercept.errors import RequestError, shown
from jinfercept.outputs import RequestOutput
from jinfercept.request import Request
from jinfercept.rollouts.samples import Rollout, Rollouts, sample_of
from jinfercept.values import plain


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
