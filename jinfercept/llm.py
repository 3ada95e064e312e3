"""The library's API: a model, its pages, a scheduler, a runner and an engine behind one class. The server is built on it."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack, final

from jax.sharding import Mesh

from jinfercept.calls import Tool
from jinfercept.chat.call_markup import AsyncCalls
from jinfercept.chat.function_tools import ChatToolLike
from jinfercept.chat.grammar.grammar import Grammars
from jinfercept.chat.messages import Message
from jinfercept.chat.options import ChatArguments, VllmArguments, check_generate
from jinfercept.chat.request_maker import RequestMaker
from jinfercept.chat.requests import Prompt
from jinfercept.config import EngineConfig, LLMOptions, RestartOptions
from jinfercept.engine.streaming import AsyncStream, Stream, aserve, serve
from jinfercept.errors import ConfigError, ModelError
from jinfercept.events import Event
from jinfercept.hooks import Detector
from jinfercept.kv.disk import DiskState
from jinfercept.models.config import ModelConfig
from jinfercept.models.protocol import Params, ServedModel
from jinfercept.outputs import RequestOutput
from jinfercept.rollouts.methods import RolloutMethods
from jinfercept.runner.executables import Progress
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.estimator import EstimatorChoice
from jinfercept.sched.orders import OrderChoice
from jinfercept.sched.plan_builder import SchedulerCounters
from jinfercept.sched.policies import PolicyChoice
from jinfercept.sched.profile import Profile
from jinfercept.start.assembly import end_token_ids
from jinfercept.start.loading import TokenizerChoice
from jinfercept.start.memory import MemoryPlan
from jinfercept.start.progress import StartDisplay
from jinfercept.start.served_engine import ServedEngine
from jinfercept.start.start import EngineSetup, set_up
from jinfercept.start.weights import WeightControls
from jinfercept.vllm_names import no_such_attribute

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@final
class LLM(RolloutMethods, WeightControls):
    """A model that generates, and pauses for its tools.

    The start logs the memory plan, its times and the sampling defaults of the checkpoint at INFO, to the logger `jinfercept`.
    It works under its own settings of JAX, whatever the caller's are (`docs/devices.md`). Before JAX's backend starts, it
    sets JAX's environment variables that the user has not set, each logged at INFO (`start/backend.py`), and JAX's
    compilation cache, unless `compilation_cache` is False or JAX has one. A script that ends aborts its requests.

    With several hosts (`coordinator`, `num_hosts`, `host_id`), only host 0 has an `LLM`. On another host the constructor
    executes the plans of host 0, and raises `SystemExit` when host 0 closes its `LLM`. If a host is lost, all processes end.

    Args:
        model: `smollm2-135m`, a Hugging Face directory, a `.gguf` file, a `ModelConfig` (with `load_format="dummy"`), a
            `Model` whose weights are in `params`, or an `EngineSetup`, without any other argument.
        params: the weights of a `Model` that is already in memory. NumPy's arrays are copied. JAX's arrays that are already
            in place are not: do not donate them before the first `update_weights`.
        tokenizer: instead of the model's: a name or path, as of a model, a `Tokenizer`, or a fast one of `transformers`.
        policy: a name, or your own (`sched.policy.Policy`): a class or a function, its place as `path.py:Class` or
            `package.module:Class`, or an object.
        estimator: predicts the durations of calls: a name, or your own (`sched.estimator.Estimator`), likewise.
        order: chooses the waiting request that starts next: a name, or your own (`sched.orders.Order`), likewise.
        profile: the price of steps and transfers, instead of a named or measured one.
        mesh: devices that serve the model together, along one axis of any name, instead of `tensor_parallel_size` and
            `devices`; `params` that lie there as the model is cut are not copied.
        lazy: compile a part of the executables before the first request, and the rest one at a time where the engine is idle
            for a moment; until then, steps that need one run on a larger one. False, and on several hosts: all are compiled
            before.
        progress: called with (text, done, total) while starting; None: a line of standard error shows the start.
        options: those of the command line, by the same names (`config.py`). Options of vLLM that need nothing here are logged
            (`docs/migration.md`). None is a default.

    Attributes:
        tokenizer, grammars: the tokenizer, and compiled structured outputs; None for a model without a tokenizer.
        make_requests, make_chats: make the requests that `generate` and `chat` submit; see `chat.request_maker`.
        engine: the running engine, as a server uses it.
        shape: the static sizes that everything was compiled for.
        start_times: seconds of the parts of the start.
        sampling_defaults: fields of `SamplingParams` whose defaults come from the checkpoint's `generation_config.json`.

    Raises:
        ConfigError: an option is unknown, out of range or impossible together with the others.
        ModelError: the model cannot be found, read or used.
    """

    def __init__(
        self,
        model: str | Path | ModelConfig | ServedModel | EngineSetup,
        *,
        params: Params | None = None,
        tokenizer: TokenizerChoice | None = None,
        policy: PolicyChoice | None = None,
        estimator: EstimatorChoice | None = None,
        order: OrderChoice | None = None,
        profile: Profile | str | Path | None = None,
        mesh: Mesh | None = None,
        lazy: bool = True,
        progress: Progress | None = None,
        **options: Unpack[LLMOptions],
    ) -> None:
        values: dict[str, Any] = {"policy": policy, "estimator": estimator, "order": order, **options}
        values |= {"params": params, "tokenizer": tokenizer, "profile": profile, "mesh": mesh}
        if not isinstance(model, EngineSetup):
            with nullcontext(progress) if progress else StartDisplay() as shown:
                model = set_up(model, lazy=lazy, progress=shown, **values)
        elif any(value is not None for value in values.values()):
            raise ConfigError("an EngineSetup takes no options", got=sorted(values), fix="give them to `set_up`")
        self.engine = engine = ServedEngine(model)
        self.model, self.tokenizer = model.model, model.tokenizer
        self.shape, self.profile, self.start_times = model.shape, model.profile, model.times
        self.sampling_defaults = model.sampling_defaults
        self.grammars = Grammars(self.tokenizer, self.model.config.vocab_size) if self.tokenizer else None
        self._requests = RequestMaker(
            self.tokenizer,
            self.grammars,
            end_token_ids(self.model.config, self.tokenizer),
            self.shape.max_model_len,
            self.sampling_defaults,
            lambda: engine.thread.check_process(),  # not of `self`: a closed LLM frees its weights at once
            engine.adapters,
            self.config.adapters,
        )
        self.make_requests, self.make_chats = self._requests.make_requests, self._requests.make_chats

    def __repr__(self) -> str:
        return f"LLM({self.engine})"

    if not TYPE_CHECKING:  # a name that does not exist stays an error of the type checker

        def __getattr__(self, name: str) -> NoReturn:
            raise no_such_attribute(name, dir(self))

    @property
    def config(self) -> EngineConfig:
        """The options, with those of the last `restart`."""
        return self.engine.setup.config

    @property
    def policy_name(self) -> str:
        """The policy as it was chosen: a name or a place, or the name of a class."""
        return self.engine.policy_name

    @property
    def memory_plan(self) -> MemoryPlan:
        """Sizes of weights and pools."""
        return self.engine.setup.memory_plan

    @property
    def disk(self) -> DiskState | None:
        """Contents and counts of `kv_disk`; None without that option."""
        disk = self.engine.setup.disk
        return None if disk is None else disk.store.state()

    @property
    def counters(self) -> SchedulerCounters:
        """Totals of the scheduler since the start, as a copy."""
        return self.engine.counters

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a prompt that brings none: vLLM's defaults, under those of `generation_config.json`."""
        return self._requests.default_params(is_chat=False)

    def get_tokenizer(self) -> "PreTrainedTokenizerFast":
        """A tokenizer of `transformers` with the tokens of this model. Raises `ModelError` if the model has none."""
        if self.tokenizer is not None:
            return self.tokenizer.to_transformers()
        raise ModelError("this model has no tokenizer", got=self.engine.setup.name, fix="LLM(…, tokenizer=…)")

    def reset_prefix_cache(self) -> bool:
        """Drop the pages of finished requests; False if others are not finished, which keep theirs."""
        return self.engine.reset_prefix_cache()

    def restart(
        self,
        policy: PolicyChoice | None = None,
        estimator: EstimatorChoice | None = None,
        order: OrderChoice | None = None,
        **options: Unpack[RestartOptions],
    ) -> None:
        """Start over with other scheduling options, empty pages and counters at zero; nothing is loaded or compiled again.

        This also mends an engine that failed. A call that raises changes nothing, but Ctrl-C waits until it is done. What is
        not given keeps its value: the policy, estimator and order are the name, place, class or function chosen last. An
        object counts for one engine.

        Raises:
            ConfigError: an option is fixed once executables are compiled, or out of range; or a part lacks members of its
                Protocol.
            RequestError: requests are not finished, or the LLM is closed.
        """
        self.engine.restart({"policy": policy, "estimator": estimator, "order": order, **options})
        self._requests.forget_chats()

    # -- prompts and conversations ---------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        tools: Iterable[Tool] | None = None,
        detector: Detector | Iterable[Detector | None] | None = None,
        async_calls: AsyncCalls | None = None,
        lora: str | Iterable[str | None] | None = None,
        on_event: Callable[[Event], None] | None = None,
        **others: Unpack[VllmArguments],
    ) -> list[RequestOutput]:
        """Serve prompts together, to the end.

        Args:
            prompts: one or several texts, lists or arrays of token ids, or `{"prompt_token_ids": [...]}`.
            sampling_params: one for all, or one for each; None: `get_default_sampling_params()`.
            tools: functions that the model may call; calls of those with a `start` text are found in the generated text. A
                tool may use this LLM: its requests are batched with all others.
            detector: finds calls in another way; one for all, or one for each.
            async_calls: the model calls tools without a `start` text in context markup language, with their declared
                arguments. It goes on while they run, and reads their results as interrupts. None: if a tool has
                `calls="async"`.
            lora: name of an adapter; one for all, or one for each.
            on_event: called with tokens, calls, results and ends as they happen.

        Returns:
            One output per prompt, in order.

        Raises:
            RequestError: a request can never be served; none is started then.
            EngineError: a step of the engine failed. It carries the outputs that are complete. A failure of one request alone
                (its detector or its grammar raises, its logits are NaN) is no exception: its finish reason is "error".
        """
        if others:
            check_generate(others)
        requests = self._requests.make_requests(prompts, sampling_params, tools, detector, None, "", async_calls, lora)
        return serve(self.engine.thread, requests, on_event=on_event)

    async def agenerate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        tools: Iterable[Tool] | None = None,
        detector: Detector | Iterable[Detector | None] | None = None,
        async_calls: AsyncCalls | None = None,
        lora: str | Iterable[str | None] | None = None,
        **others: Unpack[VllmArguments],
    ) -> list[RequestOutput]:
        """As `generate`, without blocking the event loop; cancelled, it aborts the requests."""
        if others:
            check_generate(others)
        requests = self._requests.make_requests(prompts, sampling_params, tools, detector, None, "", async_calls, lora)
        return await aserve(self.engine.thread, requests)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        tools: Iterable[ChatToolLike] | None = None,
        on_event: Callable[[Event], None] | None = None,
        **options: Unpack[ChatArguments],
    ) -> list[RequestOutput]:
        """Answer conversations, running the tools that the model calls until it has answered.

        Calls of one turn run in parallel. Meanwhile the request is paused: it keeps its generated tokens, and reads the
        results as its chat template writes them. Arguments that do not fit, and a tool that fails, are an error that the
        model reads.

        Args:
            messages: one conversation, or several; OpenAI-style messages.
            sampling_params: one for all, or one for each; None: `get_default_sampling_params()` with 1,024 tokens.
            tools: Python functions (declared by signature and docstring), any of them in a `Tool` (for a time-out or a limit
                of their own), or OpenAI-style JSON declarations. A turn that calls one of the latter ends the output.
            on_event: called with tokens, visible text, calls, results and ends as they happen.
            options: see `ChatOptions`.

        Returns:
            One output per conversation, in order. `outputs[0].messages` are the added messages: calls, results and the
            answer, without markup. `finish_reason` is "tool_calls" if the last of them has calls that were not run: with the
            `stop_reason` "max_rounds" the limit forbade it, else the caller has to run them.

        Raises:
            RequestError: messages, tools or options cannot be used with this model; nothing is started then.
            ModelError: the model has no chat template.
            EngineError: as `generate`.
        """
        return serve(
            self.engine.thread, self._requests.make_chats(messages, sampling_params, tools, options), on_event=on_event
        )

    async def achat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        tools: Iterable[ChatToolLike] | None = None,
        **options: Unpack[ChatArguments],
    ) -> list[RequestOutput]:
        """As `chat`, without blocking the event loop; cancelled, it aborts the conversations."""
        return await aserve(self.engine.thread, self._requests.make_chats(messages, sampling_params, tools, options))

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Iterable[Any] | None = None,
        detector: Detector | None = None,
        **options: Unpack[ChatArguments],
    ) -> Stream:
        """One prompt as in `generate`, or one conversation as in `chat`, event by event.

        It starts now, read or not; closing or dropping the iterator aborts it. A prompt takes only the option `async_calls`.

        The events are `Token`, `Intercepted`, `Resumed` and last `Finished`, and of asynchronous calls `Called` and
        `Interrupted`. A chat also has `Content`, the text for a person, `Reasoning` before it, and `CallStarted`, `Arguments`
        and `CallEnded` while a call is written (`Token.text` has the markup too). With `n` outputs there is a `Finished` for
        each; `request_id` tells events apart.

        Raises:
            RequestError: as `generate` and `chat`.
            EngineError: where the iteration would end, after a `Finished` of "error" for each request that a step lost.
        """
        return Stream(self.engine.thread, self._requests.make_either(prompt, sampling_params, tools, detector, options))

    def astream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Iterable[Any] | None = None,
        detector: Detector | None = None,
        **options: Unpack[ChatArguments],
    ) -> AsyncStream:
        """As `stream`, for `async for`. A task that is cancelled while it reads aborts its request."""
        return AsyncStream(
            self.engine.thread, self._requests.make_either(prompt, sampling_params, tools, detector, options)
        )

    def close(self) -> None:
        """Free the weights and the pages; does nothing in a forked child. Callers that still wait get an `EngineError`."""
        self.engine.close()

    shutdown = close

    def __enter__(self) -> Self:
        self.engine.check_open("to enter it")
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
