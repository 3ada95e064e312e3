"""Parallel sampling: splits a request with `SamplingParams(n=…)` into n requests of one output, and joins their outputs.

The first request computes the prompt. The others start afterwards, share its full pages, and pause each for its own calls.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jinfercept.outputs import CompletionOutput, RequestOutput
from jinfercept.request import Request


def forks(request: Request) -> list[Request]:
    """One request for each of its `n` outputs, the first under its own id."""
    params = request.params
    if params.n == 1:
        return [request]
    first = replace(request, params=replace(params, n=1))
    followers = [
        replace(
            request,
            id=f"{request.id}/{index}",
            params=replace(params, n=1, prompt_logprobs=None),
            leader=request.id,
            index=index,
        )
        for index in range(1, params.n)
    ]
    return [first, *followers]


def joined(requests: Iterable[Request], outputs: Mapping[str, RequestOutput]) -> list[RequestOutput]:
    """One output for each prompt: the first fork's, with the completions of all.

    Its metrics are from the first event to the last, and its counts are sums. The requests are in the order of `forks`.
    """
    return [output for output in complete(requests, outputs) if output is not None]


def complete(requests: Iterable[Request], outputs: Mapping[str, RequestOutput]) -> list[RequestOutput | None]:
    """As `joined`, with None for prompts of which an output is missing."""
    groups: dict[str, list[Any]] = {}
    for request in requests:
        groups.setdefault(request.leader or request.id, []).append(outputs.get(request.id))
    return [None if None in group else group[0] if len(group) == 1 else _together(group) for group in groups.values()]


def _together(group: list[RequestOutput]) -> RequestOutput:
    all_metrics = [output.metrics for output in group]
    firsts = [metrics.first_token_s for metrics in all_metrics if metrics.first_token_s is not None]
    counts = ("intercepted_s", "recomputed_tokens", "copied_out_tokens", "copied_in_tokens", "preemptions")
    metrics = replace(
        all_metrics[0],
        first_token_s=min(firsts, default=None),
        finished_s=max(metrics.finished_s for metrics in all_metrics),
        **{name: sum(getattr(metrics, name) for metrics in all_metrics) for name in counts},
    )
    completions = [replace(completion, index=index) for index, completion in enumerate(_with_prompt_experts(group))]
    return replace(group[0], outputs=completions, metrics=metrics)


def with_prompt_experts(requests: Iterable[Request], outputs: Mapping[str, RequestOutput]) -> dict[str, RequestOutput]:
    """The outputs of forks, by id, with the experts of the prompts' tokens, which only one fork of each prompt has computed."""
    groups: dict[str, list[RequestOutput]] = {}
    for request in requests:
        groups.setdefault(request.leader or request.id, []).append(outputs[request.id])
    pairs = (pair for group in groups.values() for pair in zip(group, _with_prompt_experts(group), strict=True))
    return {output.request_id: replace(output, outputs=[completion]) for output, completion in pairs}


def _with_prompt_experts(group: Sequence[RequestOutput]) -> list[CompletionOutput]:
    completions = [output.outputs[0] for output in group]
    tables = [completion.routed_experts for completion in completions if completion.routed_experts is not None]
    for place, completion in enumerate(completions):
        own = completion.routed_experts
        for other in tables:
            shared = min(len(group[0].prompt_tokens), len(other))
            if own is None or not len(gaps := (own[:shared] < 0).all(axis=(1, 2)).nonzero()[0]):
                break
            own = own.copy()
            own[gaps] = other[gaps]
        completions[place] = replace(completion, routed_experts=own)
    return completions
