"""A fast tokenizer built from the vocabulary that a GGUF file carries.

GGUF has the vocabulary, the merges and the *name* of the pre-tokenizer, which splits text before merging. This file defines the
pre-tokenizers of the byte-level BPE vocabularies that jinfercept serves; `gguf_sentencepiece.py` builds SentencePiece
vocabularies. Knows no tensors.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jinfercept.errors import ModelError
from jinfercept.models.gguf_header import read_header
from jinfercept.tokenizer.gguf_sentencepiece import CONTROL, USER_DEFINED, sentencepiece

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_KINDS = {
    "qwen2": "qwen2",
    "gpt-2": "gpt-2",
    "gpt2": "gpt-2",
    "smollm": "smollm",
    "llama-bpe": "llama-bpe",
    "llama3": "llama-bpe",
}
_LISTS = {"tokens": str, "merges": str, "scores": float, "token_type": int}
_MAX_TOKEN_CHARS = 1024


class GGUFVocab(NamedTuple):
    """A GGUF file's tokenizer, special tokens and chat templates."""

    backend: Tokenizer
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    special_tokens: dict[str, str]  # bos_token, eos_token, … as chat templates name them
    chat_templates: dict[str, str]  # "default", and "tool_use" where the model has one


def read_vocab(path: Path) -> GGUFVocab:
    """The tokenizer of a GGUF file.

    Raises:
        ModelError: the file cannot be read, or its vocabulary is of an unknown kind.
    """
    metadata = read_header(path).metadata
    try:
        return vocab_of(path, metadata)
    except ModelError:
        raise
    except Exception as error:  # tokenizers raises plain exceptions
        raise ModelError(
            "the vocabulary in this GGUF file is damaged", got=f"{path}: {error}"[:500], fix="download it again"
        ) from error


def vocab_of(path: Path, metadata: Mapping[str, Any]) -> GGUFVocab:
    """The tokenizer that a GGUF file's metadata describe. Raises `ModelError` for an unknown kind, others for damaged ones."""
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    _check(metadata, tokens)
    special_ids = {
        name: metadata[key]
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
        if 0 <= metadata.get(key := f"tokenizer.ggml.{name}_token_id", -1) < len(tokens)
    }
    template_names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return GGUFVocab(
        backend=_build(path, metadata, tokens, special_ids.get("bos")),
        bos_token_id=special_ids.get("bos"),
        eos_token_ids=frozenset(special_ids[name] for name in ("eos", "eot", "eom") if name in special_ids),
        special_tokens={template_names[name]: tokens[i] for name, i in special_ids.items() if name in template_names},
        chat_templates=_chat_templates(metadata),
    )


def _check(metadata: Mapping[str, Any], tokens: list[str]) -> None:
    """Raise `TypeError` for values of the wrong type, `ValueError` for tokens of absurd length."""
    for key, kind in _LISTS.items():
        values = metadata.get(f"tokenizer.ggml.{key}", [])
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise TypeError(f"tokenizer.ggml.{key} is not a list of {kind.__name__}")
    if any(len(token) > _MAX_TOKEN_CHARS for token in tokens):
        raise ValueError(f"a token of more than {_MAX_TOKEN_CHARS} characters")
    if not all(isinstance(template, str) for template in _chat_templates(metadata).values()):
        raise TypeError("tokenizer.chat_template is no text")


def _build(path: Path, metadata: Mapping[str, Any], tokens: list[str], bos_token_id: int | None) -> Tokenizer:
    model, cut = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    scored = len(metadata.get("tokenizer.ggml.scores", [])) == len(tokens)
    known = (model == "gpt2" and cut in _KINDS) or (model == "llama" and scored)
    if not tokens or not known:
        raise ModelError(
            "the vocabulary in this GGUF file is of a kind that cannot be built",
            got=f"{path}: tokenizer.ggml.model {model!r}, tokenizer.ggml.pre {cut!r}, {len(tokens)} tokens",
            fix="use the model's Hugging Face directory, or a file of model 'llama' with scores, or of model 'gpt2' with "
            f"pre one of {sorted(_KINDS)}",
        )
    kind = "llama" if model == "llama" else _KINDS[str(cut)]
    backend = sentencepiece(metadata, tokens) if kind == "llama" else _byte_level(metadata, tokens, kind)
    backend.add_tokens(
        [
            AddedToken(token, special=token_type == CONTROL, normalized=False)
            for token, token_type in zip(tokens, metadata.get("tokenizer.ggml.token_type", []), strict=False)
            if token_type in (CONTROL, USER_DEFINED)
        ]
    )
    begins = metadata.get("tokenizer.ggml.add_bos_token", kind in ("llama", "llama-bpe"))
    if bos_token_id is not None and begins:
        bos = tokens[bos_token_id]
        backend.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, bos_token_id)]
        )
    return backend


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], kind: str) -> Tokenizer:
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in metadata.get("tokenizer.ggml.merges", []))]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=kind == "llama-bpe"))
    if kind == "qwen2":
        backend.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    backend.pre_tokenizer = _pre_tokenizer(kind)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return backend


def _pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    if kind == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_WORDS if kind == "qwen2" else _LLAMA3_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    return {name: metadata[key] for name, key in keys.items() if key in metadata}
