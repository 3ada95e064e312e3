"""A fast tokenizer built from the vocabulary that a GGUF file carries.

GGUF has the vocabulary, the merges and the *name* of the pre-tokenizer, which splits text before merging and which
`gguf_words.py` defines; `gguf_sentencepiece.py` builds SentencePiece vocabularies.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from jinfercept.errors import ModelError
from jinfercept.models.gguf_header import read_header
from jinfercept.tokenizer.gguf_sentencepiece import CONTROL, SPACE, UNKNOWN, USER_DEFINED, sentencepiece
from jinfercept.tokenizer.gguf_words import CUTTERS, GEMMA4, WordCutter, pre_tokenizer

_OTHER_MODELS = {
    "bert": "WordPiece, of embedding models",
    "t5": "SentencePiece unigrams",
    "rwkv": "RWKV's trie",
    "plamo2": "PLaMo 2's",
    "no_vocab": "no vocabulary",
    "none": "no vocabulary",
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
    cutter = _cutter(path, metadata, tokens)
    if cutter is None:
        backend = sentencepiece(metadata, tokens)
    else:
        backend = _byte_level(metadata, tokens, cutter) if cutter.byte_level else _of_text(metadata, tokens)
    backend.add_tokens(_added_tokens(metadata, tokens))
    begins = cutter is GEMMA4 or metadata.get("tokenizer.ggml.add_bos_token", cutter is None or cutter.begins)
    if bos_token_id is not None and begins:
        bos = tokens[bos_token_id]
        backend.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, bos_token_id)]
        )
    return backend


def _cutter(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> WordCutter | None:
    """How text is cut into words; None for SentencePiece, which does not. Raises `ModelError` for unknown kinds."""
    model, name = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    got = f"{path}: tokenizer.ggml.model {model!r}, tokenizer.ggml.pre {name!r}, {len(tokens)} tokens"
    fix = "use the model's Hugging Face directory"
    match model:
        case "llama" if tokens and len(metadata.get("tokenizer.ggml.scores", [])) == len(tokens):
            return None
        case "gemma4" if tokens:
            return GEMMA4
        case "gpt2" if tokens and metadata.get("tokenizer.ggml.merges") and str(name) in CUTTERS:
            return CUTTERS[str(name)]
        case "gpt2" if tokens and name is None:
            fix += ", or a newer file: this one does not say how its text is cut into words"
        case "gpt2" if tokens and not metadata.get("tokenizer.ggml.merges"):
            fix += ", or a file with merges"
        case "gpt2":
            fix += f", or a file with pre one of {sorted(CUTTERS)}"
        case str() if model in _OTHER_MODELS:
            got += f" ({_OTHER_MODELS[model]})"
        case _:
            fix += ", or a file of model 'gpt2', 'gemma4', or 'llama' with scores"
    raise ModelError("the vocabulary in this GGUF file is of a kind that cannot be built", got=got, fix=fix)


def _added_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> list[AddedToken]:
    """The tokens that are found in text before it is cut, without those that only fill up the model's matrices."""
    phi3 = metadata.get("general.architecture") == "phi3" and metadata.get("tokenizer.ggml.model") == "llama"
    return [
        AddedToken(
            token,
            special=kind in (CONTROL, UNKNOWN),
            normalized=False,
            rstrip=phi3 and token not in ("<unk>", "<s>", "<|endoftext|>"),  # GGUF has no word for it
        )
        for i, (token, kind) in enumerate(zip(tokens, metadata.get("tokenizer.ggml.token_type", []), strict=False))
        if kind in (CONTROL, USER_DEFINED, UNKNOWN) and token != f"[PAD{i}]"
    ]


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], cutter: WordCutter) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=_merges(metadata), ignore_merges=cutter.whole_words))
    if cutter.normal_form:
        backend.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    backend.pre_tokenizer = pre_tokenizer(cutter)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return backend


def _of_text(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """The tokenizer of a vocabulary with merges whose tokens are texts, `▁` for a space, and characters that are none bytes."""
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=_merges(metadata), fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", SPACE)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(left, right) for left, _, right in (m.partition(" ") for m in metadata.get("tokenizer.ggml.merges", []))]


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    return {name: metadata[key] for name, key in keys.items() if key in metadata}
