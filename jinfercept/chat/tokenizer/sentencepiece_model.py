"""Reads `tokenizer.model` of SentencePiece (Llama 2, Mistral, Vicuna) without that library, where there is no `tokenizer.json`.

The file is a protocol buffer of pieces and settings, of which transformers has the schema. It is described as GGUF describes
the same vocabulary, so that both are built alike. Beside it, `tokenizer_config.json`, `added_tokens.json` and
`chat_template.jinja` say what they say to transformers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, pre_tokenizers, processors

from jinfercept.chat.tokenizer.gguf import GGUFVocab, vocab_of
from jinfercept.errors import ModelError

FILE = "tokenizer.model"
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_sentencepiece(directory: Path) -> GGUFVocab:
    """The tokenizer of a directory with a `tokenizer.model`.

    Raises:
        ModelError: the file is damaged, or no BPE of SentencePiece that leaves characters as they are.
    """
    path = directory / FILE
    try:
        described = _described(path.read_bytes())
        settings = _json(directory / "tokenizer_config.json")
        return _with_settings(vocab_of(path, described), directory, settings)
    except ModelError:
        raise
    except Exception as error:  # tokenizers raises plain exceptions
        raise ModelError(
            f"{FILE} is no vocabulary of SentencePiece that can be read",
            got=f"{path}: {error}"[:500],
            fix="save the model's tokenizer there with save_pretrained (tokenizer.json and tokenizer_config.json)",
        ) from error


def _described(data: bytes) -> dict[str, Any]:
    """The model as the metadata of a GGUF file that has the same vocabulary."""
    from transformers.convert_slow_tokenizer import import_protobuf

    model: Any = import_protobuf().ModelProto()
    model.ParseFromString(data)
    pieces, trainer, normalizer = model.pieces, model.trainer_spec, model.normalizer_spec
    if not pieces:
        raise ValueError("it has no pieces")
    unsupported = {
        "a model_type other than BPE": trainer.model_type != trainer.BPE,
        "treat_whitespace_as_suffix": trainer.treat_whitespace_as_suffix,
        "a normalisation of characters": normalizer.precompiled_charsmap,
        "remove_extra_whitespaces": normalizer.remove_extra_whitespaces,
        "no escape_whitespaces": not normalizer.escape_whitespaces,
    }
    if wrong := [name for name, is_there in unsupported.items() if is_there]:
        raise ValueError(f"it has {', '.join(wrong)}")
    ids = {"unknown": trainer.unk_id, "bos": trainer.bos_id, "eos": trainer.eos_id, "padding": trainer.pad_id}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece.piece for piece in pieces],
        "tokenizer.ggml.scores": [piece.score for piece in pieces],
        "tokenizer.ggml.token_type": [piece.type for piece in pieces],
        "tokenizer.ggml.add_space_prefix": normalizer.add_dummy_prefix,
    } | {f"tokenizer.ggml.{name}_token_id": id_ for name, id_ in ids.items() if 0 <= id_ < len(pieces)}


def _with_settings(vocab: GGUFVocab, directory: Path, settings: Mapping[str, Any]) -> GGUFVocab:
    """Adds the tokens, the template and the marks of a text's ends that other files of the directory have."""
    backend = vocab.backend
    for id_, token in sorted(_added(directory, settings).items()):
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != id_:
            raise ValueError(
                f"added token {token.content} has id {backend.token_to_id(token.content)} instead of {id_}"
            )
    if settings.get("legacy") is False and settings.get("add_prefix_space", True):
        backend.normalizer = None  # only a text's first piece begins with a space
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)  # pyright: ignore
    given = {key: settings[key] for key in _NAMED if settings.get(key)}  # each a string or an object
    texts = {key: str(token["content"] if isinstance(token, dict) else token) for key, token in given.items()}
    named = vocab.special_tokens | texts
    if strangers := [token for token in named.values() if backend.token_to_id(token) is None]:
        raise ValueError(f"tokenizer_config.json names tokens that are not there: {', '.join(strangers)}")
    bos, eos = (backend.token_to_id(named[key]) if key in named else None for key in _NAMED[:2])
    ends = {"bos_token": settings.get("add_bos_token", True), "eos_token": settings.get("add_eos_token", False)}
    marks = {key: named[key] for key, is_added in ends.items() if is_added and key in named}
    single = " ".join(filter(None, [marks.get("bos_token"), "$A", marks.get("eos_token")]))
    backend.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=single, special_tokens=[(token, backend.token_to_id(token)) for token in marks.values()]
    )
    return GGUFVocab(
        backend, bos, frozenset(id_ for id_ in (eos,) if id_ is not None), named, _templates(directory, settings)
    )


def _added(directory: Path, settings: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Tokens by id that are added to the pieces, or are pieces that are found in a text as a whole."""
    added = {
        id_: AddedToken(content, normalized=False) for content, id_ in _json(directory / "added_tokens.json").items()
    }
    for id_, token in settings.get("added_tokens_decoder", {}).items():
        flags = {key: token.get(key, False) for key in ("lstrip", "rstrip", "single_word", "special")}
        added[int(id_)] = AddedToken(token["content"], normalized=False, **flags)
    return added


def _templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    file, stated = directory / "chat_template.jinja", settings.get("chat_template") or {}
    if isinstance(stated, list):
        stated = {template["name"]: template["template"] for template in stated}
    templates = {"default": stated} if isinstance(stated, str) else dict(stated)
    return templates | ({"default": file.read_text(encoding="utf-8")} if file.is_file() else {})


def _json(file: Path) -> dict[str, Any]:
    parsed = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if not isinstance(parsed, dict):
        raise TypeError(f"{file.name} is no JSON object")
    return parsed
