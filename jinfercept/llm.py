"""The composition root and the offline API: a model, its pages, a scheduler, a runner and an engine, behind one class."""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, final

from jinfercept.chat.chats import Chats, is_conversation, make_chats
from jinfercept.chat.function_tools import ChatToolLike
from jinfercept.chat.messages import Message
from jinfercept.chat.options import ChatOptions
from jinfercept.chat.requests import Prompt, make_requests
from jinfercept.config import EngineConfig
from jinfercept.engine.async_streaming import AsyncStream, aserve
from jinfercept.engine.parallel_sampling import forks
from jinfercept.engine.streaming import Stream, serve
from jinfercept.engine.thread import EngineThread
from jinfercept.errors import ConfigError, RequestError
from jinfercept.events import Event, StreamEvent
from jinfercept.grammar.grammar import Grammars
from jinfercept.models.config import ModelConfig
from jinfercept.models.in_memory_weights import replacement_params
from jinfercept.models.protocol import Params, ServedModel
from jinfercept.request import Detector, Request, RequestOutput, Tool
from jinfercept.runner.runner import ModelRunner, RunnerShape
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.plan_builder import Counters
from jinfercept.sched.policies import check_name, check_policy
from jinfercept.sched.policy import Policy
from jinfercept.sched.profile import Profile, load_profile
from jinfercept.startup.assembly import Assembled, Machine, Recorder, assemble, chunks, end_token_ids
from jinfercept.startup.compile_counter import CompileCounter
from jinfercept.startup.profiler import EFFORTS
from jinfercept.startup.start import (
    StartTimes,
    check_attention,
    group_layers,
    load_model,
    plan_pools,
    prepare_backend,
    profile_of,
)
from jinfercept.tokenizer.load import load_tokenizer
from jinfercept.tokenizer.tokenizer import Tokenizer

_RESTART_FLAGS = {
    *(
        "policy",
        "estimator",
        "pipeline_depth",
        "max_chunk_tokens",
        "chunked_prefill",
        "preemption",
        "swap_space",
        "enable_prefix_caching",
        "seed",
        "check_pages",
    )
}


@final
class LLM:
    """A model that generates, and pauses for its tools.

    Args:
        model: `smollm2-135m`, a Hugging Face directory, a `.gguf` file, a `ModelConfig` (with `load_format="dummy"`), or a
            `Model` whose weights are in `params`.
        params: the weights of a `Model` that is already in memory.
        tokenizer: instead of the one beside the weights.
        policy: instead of one by name; see `sched.policy`.
        profile: what steps and transfers cost, instead of one by name or a measurement.
        progress: told (what, done, total) while starting.
        quiet: do not print the memory plan to standard error.
        flags: the options of the command line, by the same names: `dtype`, `max_model_len`, `kv_tokens`, … (`config.py`).

    Raises:
        ConfigError: an option is unknown, out of range or impossible together with the others.
        ModelError: the model cannot be found, read or used.
    """

    def __init__(
        self,
        model: str | Path | ModelConfig | ServedModel,
        *,
        params: Params | None = None,
        tokenizer: Tokenizer | None = None,
        policy: Policy | str | None = None,
        profile: Profile | str | Path | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        quiet: bool = False,
        **flags: Any,
    ) -> None:
        if isinstance(policy, str):
            flags["policy"] = policy
        if isinstance(profile, str | Path):
            flags["profile"] = str(profile)
        elif profile is not None and not isinstance(profile, Profile):
            raise ConfigError("a profile is a Profile, a name or a file", got=repr(profile)[:80], fix="Profile(…)")
        config = self.config = EngineConfig.from_flags(flags)
        self._flags = flags
        check_name(config.scheduler.policy)
        check_policy(policy)
        asked = config.scheduler.profile
        if asked is not None and asked not in EFFORTS:
            profile = load_profile(asked)
        prepare_backend(config)
        check_attention(config.runner.attention)
        progress = progress or (lambda what, done, total: None)
        progress("loading", 0, 1)
        began_s = time.monotonic()
        loaded = load_model(model, params, config)
        self.tokenizer = tokenizer or (load_tokenizer(loaded.source) if loaded.source else None)
        self.model = loaded.model
        progress("loading", 1, 1)
        loaded_s = time.monotonic()
        effort = asked if asked in EFFORTS and not isinstance(profile, Profile) else None
        grouping = group_layers(loaded.model, loaded.params, config, effort, progress)
        grouped_s = time.monotonic()
        with closing(CompileCounter()) as compilations:
            self.memory_plan, shape = plan_pools(loaded.model, loaded.params, config, grouping.layers_per_step)
            if not quiet:
                print(self.memory_plan, file=sys.stderr)
            chunks(config, shape, policy)
            self.runner = ModelRunner(loaded.model, loaded.params, shape, attention=config.runner.attention)
            self.runner.warm_up(progress)
        self._shape = shape
        warm_s = time.monotonic()
        if isinstance(profile, Profile):
            self.profile, how = profile, "given"
        else:
            self.profile, how = profile_of(loaded.model, self.runner, shape, config, effort, grouping.tried, progress)
        self.start_times = StartTimes(
            load_s=loaded_s - began_s,
            compile_s=warm_s - grouped_s,
            num_executables=compilations.count,
            num_cached=compilations.cached,
            profile_s=grouped_s - loaded_s + time.monotonic() - warm_s,
            profile=how,
            grouping=str(grouping),
        )
        if not quiet:
            print(self.start_times, file=sys.stderr)
        self._ids = map("request-{}".format, count())  # taken from any thread
        self.grammars = Grammars(self.tokenizer, self.model.config.vocab_size) if self.tokenizer else None
        self._closed = False
        self._machine = Machine(loaded.model.config, self.tokenizer, self.runner, shape, self.profile)
        self._begin(self._assemble(policy))

    def restart(self, policy: Policy | str | None = None, record: Recorder | None = None, **flags: Any) -> None:
        """Start over with other scheduling options, empty pages and counters at zero; nothing is loaded or compiled again.

        That mends an engine that failed too. What is refused changes nothing.

        Args:
            policy: by name, or one of your own; the name chosen last by default.
            record: observes the scheduler.
            flags: any of `estimator`, `pipeline_depth`, `max_chunk_tokens`, `chunked_prefill`, `swap_space`,
                `enable_prefix_caching`, `seed` and `check_pages`; the others keep their values.

        Raises:
            ConfigError: an option is fixed once executables are compiled, or out of range; `policy` or what `record` returns
                has not the shape that it should have.
            RequestError: requests are not finished, or the LLM is closed.
        """
        self._check_idle("start over")
        if isinstance(policy, str):
            flags["policy"] = policy
        config = EngineConfig.from_flags(self._flags | flags)
        fixed = sorted(set(flags) - _RESTART_FLAGS)
        if fixed:
            raise ConfigError(
                "only a new LLM can change this", got=", ".join(fixed), fix=f"change {sorted(_RESTART_FLAGS)}"
            )
        check_name(config.scheduler.policy)
        check_policy(policy)
        chunks(config, self._shape, policy)
        memory_plan = self.memory_plan.with_host(config.cache)
        parts = assemble(self._machine, config, memory_plan, policy, record)
        self._flags, self.config, self.memory_plan = self._flags | flags, config, memory_plan
        self._end()
        self.runner.reset()
        self._begin(parts)

    def update_weights(self, params: Params) -> None:
        """Serve other weights of the same model from now on; starts over as `restart` does, so that no page is left of the old.

        The old weights are freed once the new ones are on the device: both have to fit for a moment.

        Args:
            params: of the same structure and shapes, in any dtype; tied embeddings need not be in the head.

        Raises:
            ModelError: a weight is missing, too much, or has another shape; the old ones are served on.
            RequestError: requests are not finished.
        """
        self._check_idle("take new weights")
        weights = replacement_params(self.model, params, self.runner.params)
        self._end()
        self.runner.update(weights)
        self._begin(self._assemble(None))

    def _check_idle(self, what: str) -> None:
        """Raise `RequestError` if the LLM is closed or serves requests."""
        if self._closed:
            raise RequestError("this LLM is closed", got=f"to {what}", fix="make a new one")
        if self._thread.busy:
            raise RequestError(
                f"only an idle LLM can {what}",
                got="requests that are not finished",
                fix="wait for them, or close their streams",
            )

    def _assemble(self, policy: Policy | str | None) -> Assembled:
        return assemble(self._machine, self.config, self.memory_plan, policy, None)

    def _begin(self, parts: Assembled) -> None:
        self.engine, self._dispatcher, self.meter = parts
        self._thread = EngineThread(self.engine, self.meter.add_events)

    def _end(self) -> None:
        self._thread.close()
        self._dispatcher.close()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        tools: Iterable[Tool] = (),
        detector: Detector | Iterable[Detector | None] | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> list[RequestOutput]:
        """Serve prompts together, to the end.

        Args:
            prompts: one or several texts or `{"prompt_token_ids": [...]}`.
            sampling_params: one for all, or one for each.
            tools: what the model may call; those with a `start` text are found in what it writes. A tool may use this LLM:
                its requests are batched with all others.
            detector: finds calls in another way; one for all, or one for each.
            on_event: told of tokens, calls, results and ends as they happen.

        Returns:
            One output per prompt, in order.

        Raises:
            RequestError: a request can never be served; none is started then.
            EngineError: a step of the engine failed. It carries the outputs that are complete. What goes wrong with one
                request alone (its detector or its grammar raises) is no exception: its finish reason is "error".
        """
        return serve(self._thread, self.make_requests(prompts, sampling_params, tools, detector), on_event=on_event)

    async def agenerate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        tools: Iterable[Tool] = (),
        detector: Detector | Iterable[Detector | None] | None = None,
    ) -> list[RequestOutput]:
        """As `generate`, without blocking the event loop; cancelled, it gives the requests up."""
        return await aserve(self._thread, self.make_requests(prompts, sampling_params, tools, detector))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        tools: Iterable[ChatToolLike] = (),
        on_event: Callable[[StreamEvent], None] | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer conversations, running the tools that the model calls until it has answered.

        Calls of one turn run in parallel. While they do, the request is paused; it keeps the tokens it wrote, and reads the
        results as its chat template writes them. Arguments that do not fit, and a tool that fails, are an error that it reads.

        Args:
            messages: one conversation, or several; OpenAI-style messages.
            sampling_params: one for all, or one for each; by default 1,024 tokens at temperature 1.
            tools: Python functions (declared by signature and docstring), any of them in a `Tool` (for a time-out or a
                limit of their own), or OpenAI-style JSON declarations. A turn that calls one of the latter ends the output.
            on_event: told of tokens, visible text, calls, results and ends as they happen.
            options: see `ChatOptions`.

        Returns:
            One output per conversation, in order. `outputs[0].messages` are what was added to it: calls, results and the
            answer, without markup. `finish_reason` is "tool_calls" if the last of them has calls that were not run: where
            `stop_reason` is "max_rounds" the limit forbade it, else they are the caller's to run.

        Raises:
            RequestError: messages, tools or options cannot be used with this model; nothing is started then.
            ModelError: the model has no chat template.
            EngineError: as `generate`.
        """
        return serve(self._thread, *self.make_chats(messages, sampling_params, tools, options), on_event=on_event)

    async def achat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        tools: Iterable[ChatToolLike] = (),
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """As `chat`, without blocking the event loop; cancelled, it gives the conversations up."""
        return await aserve(self._thread, *self.make_chats(messages, sampling_params, tools, options))

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Iterable[Any] = (),
        detector: Detector | None = None,
        **options: Unpack[ChatOptions],
    ) -> Stream:
        """One prompt as in `generate`, or one conversation as in `chat`, event by event.

        It starts now, whether or not somebody reads on; closing or dropping the iterator gives it up.

        Returns:
            `Token`, `Intercepted`, `Resumed` and last `Finished`; in a chat also `Content`, what a person sees, `Reasoning`
            before it, and `CallStarted`, `Arguments` and `CallEnded` as a call is written (`Token.text` has the markup too).
            With `n` outputs, a `Finished` for each; all events say by `request_id` to which they belong.

        Raises:
            RequestError: as `generate` and `chat`.
            EngineError: where the iteration would end, if a step of the engine failed; the requests that were lost have their
                `Finished` with finish reason "error" before.
        """
        return Stream(self._thread, *self._either(prompt, sampling_params, tools, detector, options))

    def astream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Iterable[Any] = (),
        detector: Detector | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncStream:
        """As `stream`, for `async for`. A task that is cancelled while it reads gives its request up."""
        return AsyncStream(self._thread, *self._either(prompt, sampling_params, tools, detector, options))

    def make_requests(
        self,
        prompts: Any,
        params: Any,
        tools: Iterable[Tool],
        detector: Any,
        ids: Iterable[str] | None = None,
        tenant: str = "",
    ) -> list[Request]:
        """What `generate` serves, not submitted; several of a prompt with `n` outputs. From any thread.

        Args:
            ids: names for them, one for each prompt; made up by default.
            tenant: whose grammars they are.
        """
        self._thread.check_process()  # in a forked child a tokenizer may hang
        grammars = self.grammars and self.grammars.of(tenant)
        requests = make_requests(ids or self._ids, prompts, params, tools, detector, self.tokenizer, grammars)
        return [fork for request in requests for fork in forks(request)]

    def make_chats(
        self,
        messages: Any,
        params: Any,
        tools: Any,
        options: ChatOptions,
        ids: Iterable[str] | None = None,
        tenant: str = "",
    ) -> Chats:
        """What `chat` serves, not submitted, and who reads what comes of it. From any thread.

        Args:
            ids: names for them, one for each conversation; made up by default.
            tenant: whose grammars they are.
        """
        self._thread.check_process()
        ends = end_token_ids(self.model.config, self.tokenizer)
        grammars = self.grammars and self.grammars.of(tenant)
        return make_chats(ids or self._ids, messages, params, tools, options, self.tokenizer, grammars, ends)

    def _either(self, prompt: Any, params: Any, tools: Any, detector: Any, options: ChatOptions) -> Chats:
        """A single prompt or a single conversation."""
        if is_conversation(prompt):
            if detector is not None:
                raise RequestError("a chat finds its calls itself", got="a detector", fix="name a tool_call_parser")
            return self.make_chats([prompt], params, tools, options)
        if options:
            raise RequestError("options of a chat need messages", got=", ".join(options), fix="leave them out")
        return Chats(self.make_requests([prompt], params, tools, detector), {})

    @property
    def shape(self) -> RunnerShape:
        """The static sizes that everything was compiled for."""
        return self._shape

    @property
    def thread(self) -> EngineThread:
        """Serves requests that were made elsewhere."""
        return self._thread

    @property
    def counters(self) -> Counters:
        """What the scheduler has done since the start."""
        return self.engine.scheduler.counters

    def close(self) -> None:
        """Give up what is running and free the weights and the pages. Does nothing in a forked child: they are the parent's."""
        if self._closed or self._thread.is_elsewhere:
            return
        self._thread.check_caller("close()")
        self._closed = True
        self._end()
        self.runner.close()

    def __enter__(self) -> Self:
        if self._closed:
            raise RequestError("this LLM is closed", got="to enter it", fix="make a new one")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
