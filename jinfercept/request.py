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
    """Hint that a follow-up request will extend this one's context, which is retained like that of a paused request.

    A request extends a retained context if it names the finished request (`Request.follows`) or the session, or if its prompt
    begins with the finished request's. Until then the policy may evict any page of it.
    """

    #: Name of a chain of requests, of which one context is retained; "" for none.
    session: str = ""
    #: Expected seconds until the follow-up; None: they are estimated.
    expected_s: float | None = None
    #: Name under which the time after an answer is learned. After calls, it is learned under the tools' names.
    reader: str = READER
    #: The request extends the session's context and has no follow-up itself.
    last: bool = False


class Adapter(NamedTuple):
    """A loaded adapter (LoRA) of the model."""

    name: str
    #: Place among the adapters in the model's weights, from 1 on.
    slot: int
    #: Digest of its numbers. Adapters with the same numbers share contexts.
    digest: str
    #: The directory that it was read from.
    source: str = ""
    #: Number of adapters that had the name before, without those of the start.
    version: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as the engine takes it."""

    #: Unique among the requests that are not finished.
    id: str
    #: At least one, and must not change; for a long prompt, best an array of 32-bit numbers.
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    tools: Mapping[str, Tool] = field(default_factory=dict)
    #: None if the request never calls, or if its transcript finds the calls.
    detector: Detector | None = None
    #: Requests with different salts share no pages.
    cache_salt: str = ""
    #: The prompt's text, given back in the output.
    prompt: str | None = None
    #: `params.structured_outputs`, compiled, or the grammar of a turn that has to call. The text continues after a call; if
    #: the call ended it, another text begins. The request ends where nothing more can follow, but with a detector it draws an
    #: end token there, which may end a call.
    grammar: Grammar | None = None
    #: Writes the results of calls; None: each as its tool's `result` says.
    render: Renderer | None = None
    #: Id of an earlier request with the same prompt; this one starts when that prompt is computed.
    leader: str | None = None
    #: Place among the outputs of the prompt, each of which has random numbers of its own.
    index: int = 0
    #: None if no request is expected to extend this one's context.
    follow_up: FollowUp | None = None
    #: Id of the finished request whose retained context this one extends.
    follows: str | None = None
    #: Requests with a smaller one are served first, whenever they arrived.
    priority: int = 0
    #: The owner of the request; tenants share the engine fairly. "" is a tenant too, the only one without API keys.
    tenant: str = ""
    #: Weight of the tenant. Competing tenants get shares of memory·time as their weights.
    weight: float = 1.0
    #: Finds asynchronous calls and writes their results; None if the request makes none.
    markup: CallMarkup | None = None
    #: Opens the transcript of a chat; None: the request is no chat.
    transcript: "Callable[[Request], Transcript] | None" = None
    #: A tokenizer made the prompt's ids, whole numbers from 0 to below this; None: they are to be checked.
    ids_below: int | None = None
    #: None: the model without one.
    adapter: Adapter | None = None
    #: The output so far of an aborted request with the same prompt, tools and parameters, from which this one goes on. It
    #: begins with the calls that were pending. Its output and `max_tokens` cover both parts.
    continues: CompletionOutput | None = None

    @property
    def kv_salt(self) -> str:
        """Requests with different ones share no pages: different cache salts, or adapters with different numbers."""
        if self.adapter is None:
            return self.cache_salt
        return hashlib.sha256(f"{self.adapter.digest}/{self.cache_salt}".encode(errors="surrogatepass")).hexdigest()
