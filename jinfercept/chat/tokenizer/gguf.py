"""Builds a fast tokenizer from the vocabulary in a GGUF file.

GGUF has the vocabulary, the merges, and the *name* of the pre-tokenizer, which splits text before merging (`CUTTERS`). The
regular expressions are those of the models' own tokenizers; `tests/chat/tokenizer/test_published_vocabularies.py` compares
them. Llama 2, Mistral and Vicuna were trained with SentencePiece's BPE: text becomes characters, and the neighbours whose joint
piece has the best score are joined first (`sentencepiece`). That equals a BPE whose merges are ordered by these scores.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jinfercept.errors import ModelError
from jinfercept.models.gguf_header import read_header

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LOWER, _UPPER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}", r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_HAN_AND_HANGUL = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED_LETTERS = (
    r"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    r"\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    r"\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    r"\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    r"\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    r"\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    r"\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    r"\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    r"\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)


def _cased(number: str, contractions: str = "") -> str:
    # words that begin with a capital, as in OpenAI's o200k and its derivatives
    bodies = (f"[{_UPPER}]*[{_LOWER}]+", f"[{_UPPER}]+[{_LOWER}]*")
    words = (rf"[^\r\n\p{{L}}\p{{N}}]?{body}{contractions}" for body in bodies)
    return "|".join([*words, number])


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SIGNS}|{_BLANKS}"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_BLANKS}"
_GPT4O = rf"{_cased(r'\p{N}{1,3}', f'{_CONTRACTIONS}?')}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


class WordCutter(NamedTuple):
    """A pre-tokenizer, and other properties of the vocabularies that use it."""

    # regular expressions; each cuts the pieces that the one before has left, at both ends of every match
    cuts: tuple[str, ...]
    normal_form: bool = False  # text becomes Unicode's normal form C first
    whole_words: bool = False  # a word that is a token becomes that token, whatever the merges say
    begins: bool = False  # texts begin with the BOS token unless the file says otherwise


_QWEN2_CUTTER = WordCutter((_QWEN2,), normal_form=True)
_LLAMA3_CUTTER = WordCutter((_LLAMA3,), whole_words=True, begins=True)
_DIGITS_CUTTER = WordCutter((r"\p{N}", _GPT2))
GEMMA4 = WordCutter((), begins=True)  # of text with `▁` for spaces, which nothing cuts
CUTTERS: dict[str, WordCutter] = {
    **dict.fromkeys(
        ("gpt-2", "gpt2", "phi-2", "jais", "gigachat", "a.x-4.0", "mellum", "exaone4", "trillion", "granite-docling"),
        WordCutter((_GPT2,)),
    ),
    **dict.fromkeys(("mpt", "olmo"), WordCutter((_GPT2,), normal_form=True)),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3_CUTTER
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), WordCutter((_LLAMA3,))),
    **dict.fromkeys(("glm4", "glm5"), WordCutter((_LLAMA3,), whole_words=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo"), _QWEN2_CUTTER),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), WordCutter((_QWEN2,))),
    "qwen35": WordCutter(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}",
        ),
        normal_form=True,
    ),
    "ufakzeka": WordCutter((rf"{_WORDS}|\p{{N}}|{_SIGNS}|{_BLANKS}",)),
    "seed-coder": WordCutter((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",)),
    "minicpm5": WordCutter((r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}+|{_SIGNS}|{_BLANKS}"), whole_words=True),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS_CUTTER),
    "command-r": _DIGITS_CUTTER._replace(normal_form=True),
    "deepseek-llm": WordCutter(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _HAN_AND_HANGUL,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": WordCutter((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}")),
    "tekken": WordCutter(
        (rf"{_cased(r'\p{N}')}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}",), whole_words=True, begins=True
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), WordCutter((_GPT4O,))),
    "superbpe": WordCutter((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "viking": WordCutter((_BLOOM, r"\p{N}")),
}
"""The names in `tokenizer.ggml.pre` of model `gpt2`. Missing: those of embedding models, and of architectures that are
not served, unless they cut as another one does."""


def pre_tokenizer(cutter: WordCutter) -> pre_tokenizers.PreTokenizer:
    """Make the pre-tokenizer of a byte-level vocabulary."""
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in cutter.cuts]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
SPACE = "▁"


def sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """Make a SentencePiece tokenizer without special tokens. Characters without a piece become bytes.

    Args:
        metadata: with `tokenizer.ggml.scores`, one per token, and optionally `token_type`, `unknown_token_id`,
            `add_space_prefix`.
        tokens: the pieces by id.
    """
    scores = metadata["tokenizer.ggml.scores"]
    kinds = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    pieces = {token: score for token, score, kind in zip(tokens, scores, kinds, strict=True) if kind == NORMAL}
    backend = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_scored_merges(pieces, {token: i for i, token in enumerate(tokens)}),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=BYTE in kinds,
        )
    )
    steps = [normalizers.Prepend(SPACE)] if prefixed else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])  # pyright: ignore
    stripped = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence(  # pyright: ignore
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    return backend


def _scored_merges(pieces: Mapping[str, float], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = [
        (-score, ids[left], ids[right], left, right)
        for piece, score in pieces.items()
        for left, right in ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        if left in pieces and right in pieces
    ]
    return [(left, right) for *_, left, right in sorted(merges)]


_OTHER_MODELS = {
    "bert": "WordPiece, of embedding models",
    "t5": "SentencePiece unigrams",
    "rwkv": "RWKV's trie",
    "plamo2": "PLaMo 2's",
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


def read_vocab(path: Path) -> GGUFVocab | None:
    """Read the tokenizer of a GGUF file; None if it has no tokens.

    Raises `ModelError` if the file cannot be read, or its vocabulary is of an unknown kind.
    """
    metadata = read_header(path).metadata
    if not metadata.get("tokenizer.ggml.tokens"):
        return None
    try:
        return vocab_of(path, metadata)
    except ModelError:
        raise
    except Exception as error:  # tokenizers raises plain exceptions
        raise ModelError(
            "the vocabulary in this GGUF file is damaged", got=f"{path}: {error}"[:500], fix="download it again"
        ) from error


def vocab_of(path: Path, metadata: Mapping[str, Any]) -> GGUFVocab:
    """Build the tokenizer from a GGUF file's metadata.

    Raises `ModelError` for an unknown kind, other errors for damaged data.
    """
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
    elif cutter is GEMMA4:
        backend = _of_text(metadata, tokens)
    else:
        backend = _byte_level(metadata, tokens, cutter)
    backend.add_tokens(_added_tokens(metadata, tokens))
    begins = cutter is GEMMA4 or metadata.get("tokenizer.ggml.add_bos_token", cutter is None or cutter.begins)
    if bos_token_id is not None and begins:
        bos = tokens[bos_token_id]
        backend.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, bos_token_id)]
        )
    return backend


def _cutter(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> WordCutter | None:
    model, name = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    got = f"{path}: tokenizer.ggml.model {model!r}, tokenizer.ggml.pre {name!r}, {len(tokens)} tokens"
    fix = "use the model's Hugging Face directory"
    match model:
        # SentencePiece does not cut text into words
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
    phi3 = metadata.get("general.architecture") == "phi3" and metadata.get("tokenizer.ggml.model") == "llama"
    # tokens found in text before it is cut, without `[PAD…]` tokens, which only fill up the model's matrices
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
    # tokens are texts with `▁` for a space; characters without a token become bytes
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
