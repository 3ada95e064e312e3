"""What a start loads: the served model, a draft model beside it, the tokenizer that a user gives, and sampling defaults."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from jinfercept.chat.tokenizer.load import from_transformers, load_tokenizer
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.config import EngineConfig
from jinfercept.errors import ConfigError, ModelError, RequestError, refuse_any, shown
from jinfercept.models.config import ModelConfig
from jinfercept.models.gemma4 import check_alone, fitted, is_assistant
from jinfercept.models.in_memory import initial_params
from jinfercept.models.load import Loaded, bytes_to_load, dtype_name, load, locate
from jinfercept.models.mesh import ModelMesh
from jinfercept.models.model import Model
from jinfercept.models.model_directory import read_json
from jinfercept.models.protocol import Params, ServedModel, num_draft_layers
from jinfercept.runner.runner import ModelDrafter, ModelRunner
from jinfercept.runner.shape import RunnerShape
from jinfercept.sampling_params import SamplingParams
from jinfercept.start.backend import on_devices
from jinfercept.start.memory import FreeMemory, check_weights
from jinfercept.start.own_model import check_config, check_functions
from jinfercept.start.sizing import draft_shape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_model(
    model: str | Path | ModelConfig | ServedModel, params: Params | None, config: EngineConfig, mesh: ModelMesh
) -> Loaded[ServedModel]:
    """The model with its weights on its devices. Raises `ModelError`, or `ConfigError` if the weights do not fit there."""
    options = config.model
    if options.activation_dtype != "auto" and (isinstance(model, ServedModel) or params is not None):
        fix = "activation_dtype=auto, or the name of a quantised checkpoint"
        raise ModelError("activation_dtype int8 needs a checkpoint that is loaded", got="weights in memory", fix=fix)
    if isinstance(model, ServedModel):
        if params is None:
            raise ModelError("a Model needs its weights", got="no params", fix="pass params=...")
        is_own = not isinstance(model, Model)
        if is_own:
            check_config(model)
        served = on_devices(model, mesh)
        params = initial_params(served, params, mesh)
        if is_own:
            check_functions(served, params)
        return Loaded(served, params, None)
    if params is not None:
        raise ModelError("params need a Model", got=type(model).__name__, fix="pass Model(config), or leave params out")
    speculation = config.scheduling.speculation
    draft_layer = speculation.method == "mtp" and speculation.model is None
    num_bytes = bytes_to_load(
        model, dtype_name(options.dtype), mesh.size, options.load_format, options.quantization, draft_layer
    )
    check_weights(num_bytes, FreeMemory.on(*mesh.local_devices))
    return load(
        model,
        dtype=options.dtype,
        load_format=options.load_format,
        seed=options.seed,
        mesh=mesh,
        quantization=options.quantization,
        activation_dtype=options.activation_dtype,
        draft_layer=draft_layer,
    )  # pyright: ignore[reportReturnType]


def load_drafter(
    config: EngineConfig, served: ServedModel, mesh: ModelMesh, tokenizer: Tokenizer | None, *, across_hosts: bool
) -> Loaded[ServedModel] | None:
    """The draft model or the assistant that the options name, with its weights on the devices of the served model; None if they
    name none.

    Raises:
        ModelError: there is no such model, or the served one is an assistant.
        ConfigError: the options ask for drafts of a layer that the model has not; or what drafts does not fit into the memory
            that is left, has other tokens, or is for other models; or there are several hosts for a draft model.
    """
    check_alone(served.config)
    (method, *_, name), options = config.scheduling.speculation, config.model
    if method == "ngram":
        return None
    refuse_any(
        f"the method {method} of speculative_config does not work here",
        (
            name is None and not num_draft_layers(served.config),
            f"a {served.config.family} without a layer that drafts",
            "a checkpoint by name",
        ),
        (across_hosts and method == "draft_model", "several hosts", "the method ngram or mtp, or one host"),
    )
    if name is None:
        return None
    num_bytes = bytes_to_load(name, dtype_name(options.dtype), mesh.size, options.load_format)
    check_weights(num_bytes, FreeMemory.on(*mesh.local_devices))
    loaded = load(name, dtype=options.dtype, load_format=options.load_format, seed=options.seed, mesh=mesh)
    if method == "mtp":
        model = replace(loaded.model, config=fitted(loaded.model.config, served.config))
        return Loaded(model, loaded.params, loaded.source)
    if is_assistant(loaded.model.config):
        raise ConfigError("an assistant of Gemma 4 drafts by the method mtp", got=method, fix='"method": "mtp"')
    own = None if loaded.source is None else load_tokenizer(loaded.source)
    if tokenizer is not None and own is not None and not tokenizer.has_tokens_of(own):
        raise ConfigError(
            "the draft model has other tokens than the served model", got=name, fix="take one of the same family"
        )
    return loaded  # pyright: ignore[reportReturnType]


def add_drafter(
    runner: ModelRunner, served: ServedModel, draft: Loaded[ServedModel], shape: RunnerShape, attention: str
) -> ModelRunner:
    """Give a draft model to a runner that has run no plan; returns the draft model's own runner.

    The executables of both are compiled together.
    """
    sizes = draft_shape(draft.model, served, shape)
    executables = runner.executables.under("draft model")
    drafting = ModelRunner(draft.model, draft.params, sizes, attention=attention, executables=executables)
    runner.drafter = ModelDrafter(drafting, sizes, draft.model.config.vocab_size)
    return drafting


type TokenizerChoice = "Tokenizer | str | Path | tokenizers.Tokenizer | PreTrainedTokenizerBase"
_FIX = "give a directory, a .gguf file or a hub id that has one, a fast tokenizer of transformers, or leave it out"


def as_tokenizer(choice: object) -> Tokenizer:
    """The tokenizer that a user gives: ours, a name or a path as of a model, or a fast one of `transformers` or `tokenizers`.

    Raises:
        ModelError: it is none of these, is not there, or cannot be used.
    """
    if isinstance(choice, Tokenizer):
        return choice
    if isinstance(choice, str | Path):
        try:
            source = locate(choice)
        except ModelError as error:
            raise ModelError("there is no such tokenizer", got=error.got, fix=_FIX) from error
        if (tokenizer := load_tokenizer(source)) is None:
            raise ModelError("the directory has no tokenizer", got=choice, fix=_FIX)
        return tokenizer
    if isinstance(choice, tokenizers.Tokenizer):
        return Tokenizer(copy.deepcopy(choice))
    if hasattr(choice, "special_tokens_map"):
        return from_transformers(copy.deepcopy(choice), set(), "tokenizer")
    raise ModelError("this is not a tokenizer", got=shown(choice), fix=_FIX)


FILE = "generation_config.json"
NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Fields of the file that are read, and their names in `SamplingParams`."""


def sampling_defaults(option: str, source: Path | None) -> Mapping[str, Any]:
    """Fields of `SamplingParams` whose defaults come from a `generation_config.json`; empty where there is none.

    Args:
        option: `auto`: the checkpoint's file, if it has one; `vllm`: no file; else a directory that has one.
        source: of the checkpoint; None if the weights come from elsewhere.

    Raises:
        ConfigError: the directory has no such file.
        ModelError: the file is no JSON object, or one of its values cannot be used.
    """
    if option == "vllm":
        return {}
    if option != "auto":
        path = Path(option).expanduser() / FILE
        if not path.is_file():
            raise ConfigError(
                "generation_config must be auto, vllm or a directory with a generation_config.json",
                got=option,
                fix="give one of them",
            )
    elif source is None or not (path := source / FILE).is_file():
        return {}
    config = read_json(path)
    if not isinstance(config, dict):
        raise ModelError(f"{FILE} is a JSON object", got=shown(config), fix="use the original file")
    defaults = {ours: config[name] for name, ours in NAMES.items() if config.get(name) is not None}
    try:
        replace(SamplingParams(), **defaults)
    except RequestError as error:
        raise ModelError(
            f"{FILE} has a sampling parameter that cannot be used",
            got=error,
            fix="correct it, or use generation_config=vllm",
        ) from error
    return defaults
