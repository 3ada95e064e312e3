"""Reads `tokenizer.model` of SentencePiece (Llama 2, Mistral, Vicuna) without that library, where there is no `tokenizer.json`.

The file is a protocol buffer (`sentencepiece_model.proto`) of pieces and settings. It is described as GGUF describes the same
vocabulary, so that both are built alike. Beside it, `tokenizer_config.json`, `added_tokens.json` and `chat_template.jinja` say
what they say to transformers.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, pre_tokenizers, processors

from jinfercept.chat.tokenizer.gguf import NORMAL, GGUFVocab, vocab_of
from jinfercept.errors import ModelError

FILE = "tokenizer.model"
_BPE = 2
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
    """The vocabulary as GGUF's metadata."""
    pieces, trainer, normalizer = [], dict[int, Any](), dict[int, Any]()
    for number, value in _fields(data):
        match number:
            case 1:
                pieces.append(dict(_fields(value)))
            case 2:
                trainer = dict(_fields(value))
            case 3:
                normalizer = dict(_fields(value))
    if not pieces:
        raise ValueError("it has no pieces")
    unsupported = {
        "a model_type other than BPE": trainer.get(3, 1) != _BPE,
        "treat_whitespace_as_suffix": trainer.get(24, 0),
        "a normalisation of characters": normalizer.get(2),
        "remove_extra_whitespaces": normalizer.get(4, 1),
        "no escape_whitespaces": not normalizer.get(5, 1),
    }
    if wrong := [name for name, is_there in unsupported.items() if is_there]:
        raise ValueError(f"it has {', '.join(wrong)}")
    numbers = {name: trainer.get(number, usual) for name, number, usual in _IDS}
    ids = {name: number - (1 << 64) if number >> 63 else number for name, number in numbers.items()}  # signed
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece[1].decode("utf-8") for piece in pieces],
        "tokenizer.ggml.scores": [struct.unpack("<f", piece.get(2, bytes(4)))[0] for piece in pieces],
        "tokenizer.ggml.token_type": [piece.get(3, NORMAL) for piece in pieces],
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(3, 1)),
    } | {f"tokenizer.ggml.{name}_token_id": id_ for name, id_ in ids.items() if 0 <= id_ < len(pieces)}


_IDS = (("unknown", 40, 0), ("bos", 41, 1), ("eos", 42, 2), ("padding", 43, -1))
"""Fields of the trainer's settings and their defaults."""


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a message's fields: integers, or bytes. Raises `ValueError` for a damaged one."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        match key & 7:
            case 0:
                value, at = _varint(data, at)
            case 1 | 2 | 5 as wire:
                size, at = _varint(data, at) if wire == 2 else (8 if wire == 1 else 4, at)
                value, at = data[at : at + size], at + size
            case wire:
                raise ValueError(f"a field of type {wire}")
        if at > len(data):
            raise ValueError("it ends in the middle of a field")
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number in groups of 7 bits, the lowest first, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it ends in the middle of a number")
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise ValueError("a number of more than 10 bytes")


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
