"""Names that users of vLLM and transformers type: what needs nothing here is accepted, others are refused with ours.

One table for each place: flags of `vllm serve`, which are keyword arguments of `LLM` too; arguments of its methods; sampling
parameters; attributes of an `LLM`. Values are compared as text, so that a flag and a keyword argument mean the same.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jinfercept.errors import ArgumentError, ConfigError, NoSuchNameError, nearest


class Flag(NamedTuple):
    """A flag or an argument that needs nothing.

    Attributes:
        why: nothing has to be done.
        values: those that are accepted; empty: any value; None: a switch, which as a flag takes no value.
        short: its short form.
    """

    why: str
    values: tuple[str, ...] | None = None
    short: str | None = None


_COMPILED = "all executables are known at the start, and nothing else is compiled"

UNNEEDED = {
    "--enable-auto-tool-choice": Flag("tools are called wherever the model's template knows them"),
    "--enable-prompt-tokens-details": Flag("usage always has them"),
    "--enable-request-id-headers": Flag("every answer has its x-request-id"),
    "--enable-lora": Flag("--lora-modules and --max-loras make room for adapters"),
    "--enforce-eager": Flag(_COMPILED),
    "--compilation-config": Flag(_COMPILED, (), "-O"),
    "--max-seq-len-to-capture": Flag(_COMPILED, ()),
    "--disable-custom-all-reduce": Flag("XLA sums between devices"),
    "--async-scheduling": Flag("--pipeline-depth 1 is the default"),
    "--trust-remote-code": Flag("code from a model's repository is never run"),
    "--disable-log-requests": Flag("the text of requests is never logged"),
    "--no-enable-log-requests": Flag("the text of requests is never logged"),
    "--disable-log-stats": Flag("statistics are not logged; /metrics has them"),
    "--disable-uvicorn-access-log": Flag("a line for each request is all that is logged"),
    "--max-log-len": Flag("the text of requests is never logged", ()),
    "--uvicorn-log-level": Flag("the log has one level", ()),
    "--disable-frontend-multiprocessing": Flag("a server is one process"),
    "--api-server-count": Flag("a server is one process", ("1",)),
    "--pipeline-parallel-size": Flag("every device has all layers", ("1",), "-pp"),
    "--data-parallel-size": Flag("a server is one replica", ("1",), "-dp"),
    "--distributed-executor-backend": Flag("one process drives all its devices", ("mp", "uni")),
    "--cpu-offload-gb": Flag("weights stay on the device", ("0", "0.0")),
    "--tokenizer-mode": Flag("the tokenizer is the model's", ("auto",)),
    "--config-format": Flag("the format is seen from the files", ("auto", "hf")),
    "--runner": Flag("a server generates", ("auto", "generate")),
    "--task": Flag("a server generates", ("auto", "generate")),
    "--convert": Flag("a server generates", ("auto", "none")),
    "--scheduling-policy": Flag("requests are served by priority, then by --order", ("fcfs", "priority")),
    "--chat-template-content-format": Flag("the parts of a text are joined", ("auto", "string")),
    "--response-role": Flag("answers are the assistant's", ("assistant",)),
}
"""The flags by name."""

RENAMED = {
    "--num-gpu-blocks-override": "--kv-tokens, in tokens",
    "--kv-offloading-size": "--swap-space",
    "--revision": "part of the model's name: owner/name@revision",
    "--tokenizer-revision": "part of the tokenizer's name: owner/name@revision",
    "--tool-server": "--tools",
    "--hf-token": "HF_TOKEN in the environment, or `hf auth login`",
    "--download-dir": "HF_HOME in the environment",
    "--speculative-model": "--speculative-config",
    "--num-speculative-tokens": "--speculative-config",
}
"""Refused flags, and their names here."""

VALUES = {
    "--dtype": {"half": "bfloat16", "float16": "bfloat16", "float": "float32"},
    "--load-format": {"safetensors": "auto", "pt": "auto", "hf": "auto", "gguf": "auto"},
    "--quantization": {"gptq_marlin": "gptq", "awq_marlin": "awq", "compressed-tensors": "auto"},
    "--kv-cache-dtype": {"fp8_e4m3": "fp8"},
}
"""Values of flags that both have, and the values here."""

CALLS = {
    "use_tqdm": Flag("no bar is drawn; on_event gets the progress", ()),
    "lora_request": Flag("an adapter is named by lora=", ("None",)),
    "priority": Flag("prompts are served in their order", ("None",)),
    "tokenization_kwargs": Flag("a prompt is encoded as its tokenizer does", ("{}",)),
    "mm_processor_kwargs": Flag("prompts are text", ("{}",)),
    "chat_template_content_format": Flag("the parts of a text are joined", ("auto", "string")),
    "continue_final_message": Flag("an answer is a message of its own", ("False",)),
}
"""Arguments of `generate` and `chat` that need nothing."""

RENAMED_CALLS = {
    "prompt": "prompts, the first argument",
    "prompt_token_ids": "prompts: lists of token ids are prompts too",
    "input_ids": "prompts: lists of token ids are prompts too",
    "conversation": "messages, the first argument",
    "params": "sampling_params",
    "generation_config": "sampling_params",
    "stream": "LLM.stream",
    "streamer": "LLM.stream",
    "enable_thinking": 'chat_template_kwargs={"enable_thinking": …}',
}
"""Refused arguments of `generate` and `chat`, and their names here."""

RENAMED_SAMPLING = {
    "best_of": "n",
    "num_return_sequences": "n",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens, without the prompt's",
    "do_sample": "temperature: 0 is greedy",
    "eos_token_id": "stop_token_ids",
    "stop_strings": "stop",
    "no_repeat_ngram_size": "repetition_penalty or frequency_penalty",
    "guided_decoding": "structured_outputs",
    "response_format": "structured_outputs",
    "logits_processors": "logit_bias, allowed_token_ids, bad_words or structured_outputs",
    "truncate_prompt_tokens": "leave it out, and shorten the prompt",
    "use_beam_search": "leave it out: there is no beam search",
    "num_beams": "leave it out: there is no beam search",
    "length_penalty": "leave it out: there is no beam search",
    "early_stopping": "leave it out: there is no beam search",
    "output_kind": "leave it out: LLM.stream gives tokens as they come",
    "detokenize": "leave it out: outputs have text and token_ids",
    "spaces_between_special_tokens": "leave it out: the text is that of the tokens",
}
"""Refused sampling parameters, and what does the same here."""

_NO_EMBEDDINGS = "there is none of it: an LLM generates"
ATTRIBUTES = {
    **dict.fromkeys(("embed", "encode", "score", "classify", "reward", "rerank"), _NO_EMBEDDINGS),
    "encode": f"get_tokenizer().encode(text) for token ids; for embeddings {_NO_EMBEDDINGS}",
    "tokenize": "get_tokenizer().encode(text)",
    "detokenize": "get_tokenizer().decode(token_ids)",
    "decode": "get_tokenizer().decode(token_ids)",
    "apply_chat_template": "get_tokenizer().apply_chat_template(messages)",
    "set_tokenizer": "LLM(…, tokenizer=…)",
    "beam_search": "generate, with n outputs",
    "llm_engine": "engine",
    "model_config": "model.config",
    "vllm_config": "config",
    "get_metrics": "counters",
    "start_profile": "`jinfercept profile`",
    "stop_profile": "`jinfercept profile`",
    "wake_up": "wake",
    "reset_mm_cache": "reset_prefix_cache()",
    "collective_rpc": "update_weights, or the runner in `engine.setup.runner`",
    "apply_model": "model, and update_weights",
    "load_weights": "update_weights",
    "preprocess_chat": "make_chats",
    "abort_request": "close the iterator of `stream`",
}
"""Attributes that an `LLM` has not, and what does the same."""


def own_options(
    options: Mapping[str, Any], names: Collection[str], aliases: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """Keyword arguments of `LLM` by our names, without those that need nothing, and a line for the log for each of these.

    None stands for a default.

    Args:
        aliases: other names of them.

    Raises:
        ConfigError: one asks for something that cannot be done, has another name here, or is given twice.
    """
    own, notes = dict[str, Any](), list[str]()
    for option, value in options.items():
        name, flag = aliases.get(option, option), f"--{option.replace('_', '-')}"
        if name in names:
            if name in own and value is not None:
                raise ConfigError("an option is given by two names", got=option, fix=f"give {name} alone")
            if name == "dtype" and not isinstance(value, str | None):
                value = getattr(value, "__name__", str(value)).removeprefix("torch.")
            ours = own_value(f"--{name.replace('_', '-')}", value)
            if ours is not value:
                notes.append(f"{option}={value!r} is {name}={ours!r} here")
            own |= {} if ours is None else {name: ours}
        elif flag in RENAMED:
            raise ConfigError("this option has another name in jinfercept", got=option, fix=_keywords(RENAMED[flag]))
        elif flag in UNNEEDED:
            if problem := _problem(option, UNNEEDED[flag], value):
                raise ConfigError(_keywords(UNNEEDED[flag].why), **problem)
            notes.append(f"{option} is not needed: {_keywords(UNNEEDED[flag].why)}")
        else:
            own[option] = value
    return own, notes


def own_value(flag: str, value: Any) -> Any:
    """The value here of a flag that vLLM has too."""
    return VALUES.get(flag, {}).get(value, value) if isinstance(value, str) else value


def check_arguments(what: str, arguments: Mapping[str, Any], names: Iterable[str], sampling: Iterable[str]) -> None:
    """Raise `ArgumentError` for a keyword argument of `generate` or `chat` that is not theirs and asks for something.

    Args:
        what: is wrong with an unknown one.
        sampling: names of sampling parameters.
    """
    for name, value in arguments.items():
        if name in CALLS:
            if problem := _problem(name, CALLS[name], value):
                raise ArgumentError(CALLS[name].why, **problem)
        elif name not in names:
            fixes = {ours: f"SamplingParams({ours}=…)" for ours in sampling} | RENAMED_CALLS
            fixes |= {vllm_name: f"in SamplingParams: {fix}" for vllm_name, fix in RENAMED_SAMPLING.items()}
            raise unknown_argument(what, name, names, fixes)


def unknown_argument(what: str, name: str, names: Iterable[str], fixes: Mapping[str, str]) -> ArgumentError:
    """The error for an argument that there is not, with what does the same, or all that there are."""
    hint = "" if name in fixes else nearest(name, [*names])
    return ArgumentError(what, got=name + hint, fix=fixes.get(name, f"one of {', '.join(sorted(names))}"))


def no_such_attribute(name: str, names: Sequence[str]) -> NoSuchNameError:
    """The error for an attribute that an `LLM` has not, with what does the same."""
    public = [own for own in names if not own.startswith("_")]
    got = name + ("" if name in ATTRIBUTES else nearest(name, public))
    return NoSuchNameError(
        "an LLM has no such attribute", got=got, fix=ATTRIBUTES.get(name, f"one of {', '.join(public)}")
    )


def _problem(name: str, flag: Flag, value: Any) -> dict[str, Any] | None:
    """The unsupported wish of a value, and the remedy; None if there is none."""
    accepted = ("False", "True") if flag.values is None else flag.values
    if value is None or not accepted or str(value) in accepted:
        return None
    return {"got": f"{name}={value!r}"[:80], "fix": f"leave it out, or give {' or '.join(accepted)}"}


def _keywords(text: str) -> str:
    """A text whose flags are named as keyword arguments."""
    return re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), text)
