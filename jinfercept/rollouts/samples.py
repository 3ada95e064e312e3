"""`Rollouts`: samples of prompts as NumPy arrays for a trainer. None of their tokens was ever tokenised again."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, SupportsIndex, final, overload

import numpy as np
from jaxtyping import Float32, Int8, Int16, Int32

from jinfercept.errors import RequestError, shown
from jinfercept.outputs import CompletionOutput, FinishReason, KeptTokens, RequestOutput
from jinfercept.request import Request
from jinfercept.values import plain


class RolloutCall(NamedTuple):
    """A call that a sample made."""

    name: str  # as the model wrote it
    arguments: str  # as the model wrote them
    # text of the result ("" if it was token ids), of which the model may have read less; None: no result
    result: str | None
    status: str  # `Result.status`, or "pending" without a result
    duration_s: float
    span: tuple[int, int]  # start and end (exclusive) of the result's tokens in the sample's `token_ids`


@final
@dataclass(frozen=True, eq=False)
class Rollout:
    """One sample of a prompt.

    `n` counts all its tokens: those of the prompt, generated ones, results of tools, and later messages.

    Attributes:
        prompt: place of the prompt among the given ones. Samples with the same place are a group.
        index: place in the group.
        num_prompt: number of leading tokens that are the prompt.
        token_ids: `[n]`, the tokens that the model read and wrote.
        loss_mask: `[n]`, 1 where the model generated the token; 0 for the prompt, results of tools, and inserted text.
        logprobs: `[n]`, natural logarithm of each generated token's probability by the model's own logits; 0 for other tokens.
        processed_logprobs: `[n]`, the same by the distribution that the token was drawn from: after temperature, penalties,
            `top_k`, `top_p`, `min_p` and grammar.
        weight_versions: `[n]`, version of the weights that generated each token, plus the version of its adapter; -1 for
            other tokens.
        kept_tokens: for each token, an ascending array of the tokens that could be drawn in its place; None where nothing
            was cut. Empty if nothing could ever be cut.
        routed_experts: `[n - 1, layers, experts]`, see `CompletionOutput`; None if not requested.
        finish_reason, stop_reason: see `CompletionOutput`; "abort": the sample is partial, and may go on.
        text: of the last answer, results of tools included.
        conversation: messages of a chat so far, with the answers and calls; empty for other prompts.
    """

    prompt: int
    index: int
    num_prompt: int
    token_ids: Int32[np.ndarray, "n"]
    loss_mask: Int8[np.ndarray, "n"]
    logprobs: Float32[np.ndarray, "n"]
    processed_logprobs: Float32[np.ndarray, "n"]
    weight_versions: Int32[np.ndarray, "n"]
    kept_tokens: KeptTokens
    routed_experts: Int16[np.ndarray, "n layers experts"] | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    calls: tuple[RolloutCall, ...]
    text: str
    conversation: tuple[Mapping[str, Any], ...] = ()
    origin: "Origin | None" = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        sizes = f"{len(self)} tokens, {int(self.loss_mask.sum())} of them generated, {len(self.calls)} calls"
        return f"Rollout(prompt={self.prompt}, index={self.index}, {sizes}, {self.finish_reason!r})"

    @property
    def is_partial(self) -> bool:
        """Whether the sample was aborted, so that `rollout` can continue it."""
        return self.finish_reason == "abort"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "origin": None}  # its request has functions of this process


class Origin(NamedTuple):
    """The request behind a sample. With it, the process that made the sample can continue it."""

    request: Request  # the last one that was served for the sample
    output: CompletionOutput
    before: Rollout | None  # the sample whose tokens were that request's prompt; None: the request was the first
    conversation: tuple[Mapping[str, Any], ...]  # messages of a chat that the request has answered


@final
class Rollouts(Sequence[Rollout]):
    """Samples in the order of their prompts, with the samples of a group together.

    Slices and `group` are `Rollouts` too, and `+` joins them. Arrays are padded after the end of each sample. `Rollouts` can be
    pickled, but a partial sample that was pickled cannot be continued.

    Args:
        pad_id: fills the end of `token_ids`.

    Attributes:
        samples: each by itself, without padding.
    """

    def __init__(self, samples: Iterable[Rollout], pad_id: int = 0) -> None:
        self.samples, self._pad_id = tuple(samples), plain(pad_id)
        if wrong := [sample for sample in self.samples if not isinstance(sample, Rollout)]:
            raise RequestError("Rollouts must hold Rollout", got=shown(wrong[0]), fix="give a list of Rollout")
        if type(self._pad_id) is not int or not -(2**31) <= self._pad_id < 2**31:
            raise RequestError("pad_id is a token id", got=shown(pad_id), fix="give a whole number of 32 bits")

    def __len__(self) -> int:
        return len(self.samples)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Rollout: ...
    @overload
    def __getitem__(self, index: slice) -> "Rollouts": ...
    def __getitem__(self, index: SupportsIndex | slice) -> "Rollout | Rollouts":
        return Rollouts(self.samples[index], self._pad_id) if isinstance(index, slice) else self.samples[index]

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self.samples)

    def __add__(self, others: Iterable[Rollout]) -> "Rollouts":
        return Rollouts((*self.samples, *others), self._pad_id)

    def __repr__(self) -> str:
        sizes = f"{len(self)} samples of {len(self.groups)} prompts, {self.num_generated} tokens generated"
        ends = Counter(sample.finish_reason for sample in self)
        return f"Rollouts({sizes}, {ends['abort']} partial, {ends['error']} failed)"

    def group(self, prompt: int) -> "Rollouts":
        """The samples of one prompt, given its place."""
        return Rollouts([sample for sample in self if sample.prompt == prompt], self._pad_id)

    @property
    def groups(self) -> "list[Rollouts]":
        """The samples of each prompt."""
        return [self.group(prompt) for prompt in dict.fromkeys(sample.prompt for sample in self)]

    @property
    def is_partial(self) -> bool:
        """Whether any sample was aborted."""
        return any(sample.is_partial for sample in self)

    @property
    def num_generated(self) -> int:
        """Number of tokens that the model generated."""
        return sum(int(sample.loss_mask.sum()) for sample in self)

    @cached_property
    def lengths(self) -> Int32[np.ndarray, "S"]:
        """Tokens of each sample, including its prompt."""
        return np.array([len(sample) for sample in self], np.int32)

    @cached_property
    def prompts(self) -> Int32[np.ndarray, "S"]:
        """The place of each sample's prompt; equal within a group."""
        return np.array([sample.prompt for sample in self], np.int32)

    @cached_property
    def token_ids(self) -> Int32[np.ndarray, "S T"]:
        """The tokens of each sample; `pad_id` after its end."""
        return self.padded()["token_ids"]

    @cached_property
    def loss_mask(self) -> Int8[np.ndarray, "S T"]:
        """1 where the model generated the token, otherwise 0."""
        return self.padded()["loss_mask"]

    @cached_property
    def logprobs(self) -> Float32[np.ndarray, "S T"]:
        """Log-probabilities by the model's own logits; 0 where `loss_mask` is 0."""
        return self.padded()["logprobs"]

    @cached_property
    def processed_logprobs(self) -> Float32[np.ndarray, "S T"]:
        """Log-probabilities in the distribution that tokens were drawn from; 0 where `loss_mask` is 0."""
        return self.padded()["processed_logprobs"]

    @cached_property
    def weight_versions(self) -> Int32[np.ndarray, "S T"]:
        """Versions of the weights that generated the tokens; -1 where `loss_mask` is 0."""
        return self.padded()["weight_versions"]

    def padded(self, length: int | None = None, multiple: int = 1) -> dict[str, np.ndarray]:
        """Pad `token_ids`, `loss_mask`, `logprobs`, `processed_logprobs` and `weight_versions` to `[samples, length]`.

        Raises `RequestError` if a sample is longer than `length`, or a number is below 1.

        Args:
            length: of all arrays; None: that of the longest sample, rounded up to `multiple`.
            multiple: keeps the number of different shapes small, since a trainer compiles for each.
        """
        length, multiple, longest = plain(length), plain(multiple), max(map(len, self), default=0)
        for number in (multiple, 1 if length is None else length):
            if type(number) is not int or number < 1:
                raise RequestError("lengths are whole numbers above 0", got=shown(number), fix="give 1 or more")
        if length is None:
            length = -(-longest // multiple) * multiple
        if longest > length:
            raise RequestError(
                "the samples are longer than the arrays", got=longest, fix=f"give length={longest} or more"
            )
        fills = {"token_ids": self._pad_id, "loss_mask": 0, "logprobs": 0.0, "processed_logprobs": 0.0}
        return {
            name: _filled([getattr(sample, name) for sample in self], length, fill)
            for name, fill in (fills | {"weight_versions": -1}).items()
        }


def _filled(rows: Sequence[np.ndarray], length: int, fill: float) -> np.ndarray:
    dtype = rows[0].dtype if rows else np.int32
    filled = np.full((len(rows), length), fill, dtype)
    for place, row in enumerate(rows):
        filled[place, : len(row)] = row
    return filled


def sample_of(
    prompt: int,
    request: Request,
    output: RequestOutput,
    # the sample that it continues: the request's prompt is that sample's tokens and the inserted ones; None: it is new
    before: Rollout | None,
    conversation: tuple[Mapping[str, Any], ...],  # messages of a chat that the request has answered
) -> Rollout:
    """Make the sample of a request that has ended, whose prompt has the given place."""
    [completion] = output.outputs
    ids = np.asarray(request.prompt_token_ids, np.int32)
    num_prompt = len(ids)
    mask = np.array(completion.loss_mask, np.int8)
    reported = zip(completion.token_ids, completion.logprobs or [None] * len(mask), strict=True)
    raw = [0.0 if named is None else named[token].logprob for token, named in reported]
    processed = [0.0 if value is None else value for value in completion.processed_logprobs or [None] * len(mask)]
    kept_tokens = completion.kept_tokens
    sample = Rollout(
        prompt,
        request.index,
        num_prompt,
        np.concatenate((ids, np.array(completion.token_ids, np.int32))),
        _behind(num_prompt, 0, mask, np.int8),
        _behind(num_prompt, 0.0, raw, np.float32),
        _behind(num_prompt, 0.0, processed, np.float32),
        _behind(num_prompt, -1, completion.weight_versions, np.int32),
        KeptTokens(() if kept_tokens is None else (*(None,) * num_prompt, *kept_tokens.sets)),
        completion.routed_experts,
        completion.finish_reason,
        completion.stop_reason,
        tuple(_calls(completion, num_prompt)),
        completion.text,
        (*conversation, *completion.messages),
        Origin(request, completion, before, conversation),
    )
    return sample if before is None else _joined(before, sample)


def _behind(num_prompt: int, fill: float, values: Any, dtype: type) -> Any:
    return np.concatenate((np.full(num_prompt, fill, dtype), np.asarray(values, dtype)))


def _calls(completion: CompletionOutput, start: int) -> Iterator[RolloutCall]:
    calls = [
        (call, pause.results[place] if place < len(pause.results) else None, pause.span)
        for pause in completion.interceptions
        for place, call in enumerate(pause.calls)
    ]
    behind = [(item.call, item.result, item.span) for item in completion.interrupts]
    behind += [(call, None, (0, 0)) for call in completion.cancelled if call.name]
    spans = {call.span for call, *_ in behind}  # asynchronous calls, of which some were waited for
    for call, result, (first, end) in (*(item for item in calls if item[0].span not in spans), *behind):
        if result is None:
            yield RolloutCall(call.name, call.arguments, None, "pending", 0.0, (0, 0))
        else:
            span = (start + first, start + end)
            yield RolloutCall(call.name, call.arguments, result.text, result.status, result.duration_s, span)


def _joined(before: Rollout, sample: Rollout) -> Rollout:
    # the prompt of `sample` begins with all tokens of `before`, whose own values are kept for these
    count, changed = len(before), {}
    for name in ("loss_mask", "logprobs", "processed_logprobs", "weight_versions"):
        values = getattr(sample, name).copy()
        values[:count] = getattr(before, name)
        changed[name] = values
    sets, first = sample.kept_tokens.sets, before.kept_tokens.sets
    if sets or first:
        sets = (*(first or (None,) * count), *(sets or (None,) * len(sample))[count:])
    return replace(
        sample,
        prompt=before.prompt,
        index=before.index,
        num_prompt=before.num_prompt,
        kept_tokens=KeptTokens(sets),
        routed_experts=_with_experts(before, sample),
        calls=tuple(chain(before.calls, sample.calls)),
        **changed,
    )


def _with_experts(before: Rollout, sample: Rollout) -> Any:
    if sample.routed_experts is None or before.routed_experts is None:
        return sample.routed_experts
    experts = sample.routed_experts.copy()
    computed = np.flatnonzero((before.routed_experts >= 0).all(axis=(1, 2)))
    # earlier tokens keep the experts that were used when they were generated
    experts[computed] = before.routed_experts[computed]
    return experts
