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
    """Hint that a follow-up request will extend the context of this one: the context is retained, as that of a paused request.

    A request extends a retained context if it names the finished request (`Request.follows`) or the session, or if its prompt
    begins with the finished request's. Until then the policy may evict any page of it.

    Attributes:
        session: name of a chain of requests, of which one context is retained; "" for none.
        expected_s: expected seconds until the follow-up; None if they are to be estimated.
        reader: name under which the time after an answer is learned; after calls it is learned under the tools' names.
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
        digest: of its numbers: contexts of adapters with the same numbers are alike.
        source: the directory that it was read from.
        version: how many adapters had the name before, those of the start not counted.
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
        prompt_token_ids: at least one; of a long prompt best an array of 32-bit numbers. Nothing may change them.
        params: how to sample.
        tools: tools that may be called, by name.
        detector: finds calls; None if the request never calls, or if its transcript finds them.
        transcript: opens the transcript of a chat; None: the request is no chat.
        cache_salt: requests with different salts share no pages.
        prompt: the prompt's text, given back in the output.
        grammar: `params.structured_outputs`, compiled, or the grammar of a turn that has to call. The text continues after a
            call; if the call ended it, another text begins. The request ends where nothing more can follow; one with a detector
            draws an end token there, which may end a call.
        markup: finds asynchronous calls, and writes their results; None if the request makes none.
        render: writes the results of calls; None: each as its tool's `result` says.
        leader: id of a request with the same prompt that was submitted before; this one starts once that prompt is computed.
        index: place among the outputs of the prompt, each of which has random numbers of its own.
        follow_up: hint that another request will extend this one's context; None if none is expected.
        follows: id of the finished request whose retained context this one extends.
        priority: requests with a smaller one are served first, whenever they arrived.
        tenant: the owner of the request; tenants share the engine fairly. "" is a tenant too, the only one without API keys.
        weight: of the tenant: while tenants compete, their shares of memory·time are as their weights.
        ids_below: the ids of the prompt, a tokenizer's, are whole numbers from 0 to below this; None: they are to be checked.
        adapter: that the model has for this request; None: the model as it is.
        continues: the output so far of a request with the same prompt, tools and parameters that was aborted: this one goes on
            from there, begins with the calls that were pending, and its output has both parts. `max_tokens` counts both.
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
