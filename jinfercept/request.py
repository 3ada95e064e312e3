"""`Request`: a prompt and everything by which the engine serves it. Frozen."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jinfercept.calls import READER, Tool
from jinfercept.hooks import CallMarkup, Detector, Grammar, Renderer, Transcript
from jinfercept.outputs import CompletionOutput
from jinfercept.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class FollowUp:
    """Hint that a follow-up request will extend the context of this one: the context is retained, like that of a paused
    request.

    A request extends a retained context if it names the finished request (`Request.follows`) or the session, or if its prompt
    begins with the finished request's. Until then the policy may evict any page of it.

    Attributes:
        session: name of a chain of requests, of which one context is retained; "" for none.
        expected_s: expected seconds until the follow-up; None: they are estimated.
        reader: name under which the time after an answer is learned. After calls, it is learned under the tools' names.
        last: the request extends the session's context and has no follow-up itself.
    """

    session: str = ""
    expected_s: float | None = None
    reader: str = READER
    last: bool = False


class Adapter(NamedTuple):
    """A loaded adapter (LoRA) of the model.

    Attributes:
        slot: its place among the adapters in the model's weights, from 1 on.
        digest: of its numbers. Adapters with the same numbers share contexts.
        source: the directory that it was read from.
        version: number of adapters that had the name before, without those of the start.
    """

    name: str
    slot: int
    digest: str
    source: str = ""
    version: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as the engine takes it.

    Attributes:
        id: unique among the requests that are not finished.
        prompt_token_ids: at least one, and must not change; for a long prompt, best an array of 32-bit numbers.
        tools: by name.
        detector: finds calls; None if the request never calls, or if its transcript finds them.
        transcript: opens the transcript of a chat; None: the request is no chat.
        cache_salt: requests with different salts share no pages.
        prompt: the prompt's text, given back in the output.
        grammar: `params.structured_outputs`, compiled, or the grammar of a turn that has to call. The text continues after a
            call; if the call ended it, another text begins. The request ends where nothing more can follow, but with a
            detector it draws an end token there, which may end a call.
        markup: finds asynchronous calls and writes their results; None if the request makes none.
        render: writes the results of calls; None: each as its tool's `result` says.
        leader: id of an earlier request with the same prompt; this one starts when that prompt is computed.
        index: place among the outputs of the prompt, each of which has random numbers of its own.
        follow_up: None if no request is expected to extend this one's context.
        follows: id of the finished request whose retained context this one extends.
        priority: requests with a smaller one are served first, whenever they arrived.
        tenant: the owner of the request; tenants share the engine fairly. "" is a tenant too, the only one without API keys.
        weight: of the tenant. Competing tenants get shares of memory·time as their weights.
        ids_below: a tokenizer made the prompt's ids, whole numbers from 0 to below this; None: they are to be checked.
        adapter: None: the model without one.
        continues: the output so far of an aborted request with the same prompt, tools and parameters, from which this one
            goes on. It begins with the calls that were pending. Its output and `max_tokens` cover both parts.
    """

    id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    tools: Mapping[str, Tool] = field(default_factory=dict)
    detector: Detector | None = None
    cache_salt: str = ""
    prompt: str | None = None
    grammar: Grammar | None = None
    render: Renderer | None = None
    leader: str | None = None
    index: int = 0
    follow_up: FollowUp | None = None
    follows: str | None = None
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    markup: CallMarkup | None = None
    transcript: "Callable[[Request], Transcript] | None" = None
    ids_below: int | None = None
    adapter: Adapter | None = None
    continues: CompletionOutput | None = None

    @property
    def kv_salt(self) -> str:
        """Requests with different ones share no pages: different cache salts, or adapters with different numbers."""
        if self.adapter is None:
            return self.cache_salt
        return hashlib.sha256(f"{self.adapter.digest}/{self.cache_salt}".encode(errors="surrogatepass")).hexdigest()
