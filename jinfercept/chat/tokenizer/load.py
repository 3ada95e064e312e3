"""Reads the tokenizer of a model from the files that the model has."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from jinfercept.chat.tokenizer.gguf import read_vocab
from jinfercept.chat.tokenizer.tokenizer import SETTINGS_FILE, Tokenizer
from jinfercept.errors import ModelError
from jinfercept.models.model_directory import check_model_directory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")
_SAVE = "save the model's tokenizer there with save_pretrained (tokenizer.json and tokenizer_config.json)"


def load_tokenizer(source: Path | None) -> Tokenizer | None:
    """Load the tokenizer of a model directory, converted or not, or of a `.gguf` file; None if there is none to read.

    Raises `ModelError` if there is a tokenizer that cannot be used.
    """
    if source is None:
        return None
    if source.suffix == ".gguf":
        vocab = read_vocab(source)
        if vocab is None:
            return None
        return Tokenizer(
            vocab.backend,
            bos_token_id=vocab.bos_token_id,
            eos_token_ids=vocab.eos_token_ids,
            special_tokens=vocab.special_tokens,
            chat_templates=vocab.chat_templates,
        )
    check_model_directory(source)
    if (source / SETTINGS_FILE).is_file():
        return Tokenizer.from_saved(source)
    if any((source / name).is_file() for name in _TOKENIZER_FILES):
        return _from_directory(source)
    return None


def _from_directory(path: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    is_sentencepiece = not any((path / name).is_file() for name in _TOKENIZER_FILES[:2])
    try:
        if is_sentencepiece:  # AutoTokenizer takes Llama's class, which has a rule of its own for spaces
            loaded: Any = _read_sentencepiece(path)
        else:
            loaded = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        return from_transformers(loaded, _configured_ids(path), str(path))
    except ModelError:
        raise
    except Exception as error:  # whatever a broken or foreign file makes of it
        raise ModelError("the tokenizer cannot be read", got=f"{path}: {error}", fix=_SAVE) from error


def _read_sentencepiece(path: Path) -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    settings, numbered = (
        json.loads((path / name).read_text(encoding="utf-8")) if (path / name).is_file() else {}
        for name in ("tokenizer_config.json", "added_tokens.json")
    )
    begins = settings.get("add_bos_token", True)
    loaded = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True, add_bos_token=begins)
    stated = {int(id_): token["content"] for id_, token in settings.get("added_tokens_decoder", {}).items()}
    stated |= {id_: name for name, id_ in numbered.items()}
    added = {id_: str(token) for id_, token in loaded.added_tokens_decoder.items() if id_ >= loaded.vocab_size}
    # transformers numbers added tokens anew, which may contradict the ids in the files
    if wrong := [
        name for id_, name in (added | stated).items() if stated.get(id_) != loaded.convert_ids_to_tokens(id_)
    ]:
        raise ValueError(f"added tokens without an id, or with another one than stated: {', '.join(wrong)}")
    return loaded


def from_transformers(loaded: Any, eos_token_ids: set[int], place: str) -> Tokenizer:
    """Wrap a tokenizer of `transformers` on the same backend, with further end tokens. Raises `ModelError` for a slow one."""
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError("the tokenizer has no fast form", got=f"{place}: {type(loaded).__name__}", fix=_SAVE)
    templates = loaded.chat_template or {}
    own = {loaded.eos_token_id} if loaded.eos_token_id is not None else set()
    return Tokenizer(
        backend,
        bos_token_id=loaded.bos_token_id,
        eos_token_ids=frozenset(own | eos_token_ids),
        special_tokens={
            name: str(token) for name, token in loaded.special_tokens_map.items() if isinstance(token, str)
        },
        chat_templates={"default": templates} if isinstance(templates, str) else templates,
    )


def _configured_ids(path: Path) -> set[int]:
    try:
        return _configured_eos(path)
    except (ValueError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise ModelError(
            "the end tokens of the tokenizer cannot be read", got=f"{path}: {error}"[:500], fix=_SAVE
        ) from error


def _configured_eos(path: Path) -> set[int]:
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (path / name).is_file():
            eos = json.loads((path / name).read_text(encoding="utf-8")).get("eos_token_id")
            ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    if not all(type(id_) is int for id_ in ids):
        raise TypeError(f"eos_token_id {ids}"[:200])
    return ids
