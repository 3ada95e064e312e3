"""The draft model of an engine: loaded beside the served model onto its devices, with a runner that works for its runner."""

from jinfercept.config import EngineConfig
from jinfercept.errors import ConfigError
from jinfercept.models.load import Loaded, bytes_to_load, dtype_name, load
from jinfercept.models.mesh import ModelMesh
from jinfercept.models.protocol import ServedModel
from jinfercept.runner.drafting import ModelDrafter
from jinfercept.runner.runner import ModelRunner
from jinfercept.runner.shape import RunnerShape
from jinfercept.startup.memory import FreeMemory, check_weights
from jinfercept.startup.sizing import draft_shape
from jinfercept.tokenizer.load import load_tokenizer
from jinfercept.tokenizer.tokenizer import Tokenizer


def load_draft_model(
    config: EngineConfig, mesh: ModelMesh, tokenizer: Tokenizer | None, *, across_hosts: bool
) -> Loaded[ServedModel] | None:
    """The draft model that the options name, with its weights; None if they name none.

    Args:
        mesh: the devices of the served model.
        across_hosts: whether these are devices of several hosts.

    Raises:
        ModelError: there is no such model.
        ConfigError: it does not fit into the memory that is left, has other tokens, or there are several hosts.
    """
    name, options = config.scheduling.speculation.model, config.model
    if name is None:
        return None
    if across_hosts:
        raise ConfigError("several hosts allow no draft model", got=name, fix="use the method ngram, or one host")
    num_bytes = bytes_to_load(name, dtype_name(options.dtype), mesh.size, options.load_format)
    check_weights(num_bytes, FreeMemory.on(*mesh.local_devices))
    loaded = load(name, dtype=options.dtype, load_format=options.load_format, seed=options.seed, mesh=mesh)
    own = None if loaded.source is None else load_tokenizer(loaded.source)
    if tokenizer is not None and own is not None and not tokenizer.has_tokens_of(own):
        raise ConfigError(
            "the draft model has other tokens than the served model", got=name, fix="take one of the same family"
        )
    return loaded  # pyright: ignore[reportReturnType]


def add_drafter(
    runner: ModelRunner, served: ServedModel, draft: Loaded[ServedModel], shape: RunnerShape, attention: str
) -> ModelRunner:
    """Give a runner a draft model; returns this model's own runner.

    Args:
        runner: of the served model, which has run no plan; the draft model's executables are compiled with its own.
        attention: implementation of attention, see `pallas.attention`.
    """
    sizes = draft_shape(draft.model, served, shape)
    executables = runner.executables.under("draft model")
    drafting = ModelRunner(draft.model, draft.params, sizes, attention=attention, executables=executables)
    runner.drafter = ModelDrafter(drafting, sizes, draft.model.config.vocab_size)
    return drafting
