"""Vocabularies out of small GGUF files, of every kind that can be built, and files that cannot be read."""

import functools
import json
from pathlib import Path

import pytest
from gguf import GGUFWriter

from jinfercept.errors import ModelError
from jinfercept.models.gguf_header import read_header
from jinfercept.tokenizer.gguf import read_vocab

TOKENS = ["<|begin|>", "<|end|>", "<note>", *"abĠ123'SĊ", "ab", "Ġa", "12", "123", "'S"]
MERGES = ["Ġ a", "a b", "1 2", "' S"]  # "123" is a token that no merge makes
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
SENTENCEPIECE = json.loads((Path(__file__).parents[1] / "golden" / "sentencepiece.json").read_text(encoding="utf-8"))


def write(path: Path, pre: str | None, model: str = "gpt2", add_bos: bool | None = None) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_token_types([CONTROL, CONTROL, USER_DEFINED, *[NORMAL] * (len(TOKENS) - 3)])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(2)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.add_chat_template([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "ab ab123", ["ab", "Ġa", "b", "12", "3"]),
        ("smollm", "ab ab123", ["ab", "Ġa", "b", "1", "2", "3"]),
        ("llama-bpe", "ab ab123", ["ab", "Ġa", "b", "123"]),
        ("gpt-2", "a'S", ["a", "'", "S"]),
        ("llama-bpe", "a'S", ["a", "'S"]),
        ("llama-bpe", "<note>a<|end|>\n", ["<note>", "a", "<|end|>", "Ċ"]),
        ("qwen2", "ab ab123'S", ["ab", "Ġa", "b", "1", "2", "3", "'S"]),
    ],
)
def test_text_is_cut_as_its_kind_says(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    backend = read_vocab(write(tmp_path / "tiny.gguf", pre)).backend
    assert backend.encode(text, add_special_tokens=False).tokens == pieces
    assert backend.decode(backend.encode(text).ids, skip_special_tokens=False).removeprefix("<|begin|>") == text


@pytest.mark.parametrize(
    ("pre", "add_bos", "first"),
    [("gpt-2", None, "a"), ("llama-bpe", None, "<|begin|>"), ("llama-bpe", False, "a"), ("smollm", True, "<|begin|>")],
)
def test_the_begin_token_is_the_files_or_its_kinds_to_decide(
    tmp_path: Path, pre: str, add_bos: bool | None, first: str
) -> None:
    backend = read_vocab(write(tmp_path / "tiny.gguf", pre, add_bos=add_bos)).backend
    assert backend.encode("a", add_special_tokens=True).tokens[0] == first


def write_sentencepiece(
    path: Path, *, prefix: bool = True, added: tuple[str, ...] = ("<note>",), architecture: str = "llama"
) -> Path:
    """The golden vocabulary with tokens added, as llama.cpp's converter writes one of Llama 2; `{}` stands for a token's id."""
    writer = GGUFWriter(path, architecture)
    size = len(SENTENCEPIECE["pieces"])
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*SENTENCEPIECE["pieces"], *(token.format(size + i) for i, token in enumerate(added))])
    writer.add_token_scores([*SENTENCEPIECE["scores"], *[0.0] * len(added)])
    writer.add_token_types([*SENTENCEPIECE["kinds"], *[USER_DEFINED] * len(added)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@functools.cache
def hugging_face():
    """transformers' tokenizer of the same vocabulary."""
    from transformers import LlamaTokenizerFast

    ids = {piece: i for i, piece in enumerate(SENTENCEPIECE["pieces"])}
    normal = {piece for piece, kind in zip(ids, SENTENCEPIECE["kinds"], strict=True) if kind == NORMAL}
    splits = [(piece[:cut], piece[cut:], piece) for piece in normal for cut in range(1, len(piece))]
    splits = [split for split in splits if normal.issuperset(split)]
    splits.sort(key=lambda split: (-SENTENCEPIECE["scores"][ids[split[2]]], ids[split[0]]))
    return LlamaTokenizerFast(vocab=ids, merges=[split[:2] for split in splits], legacy=True)


@pytest.mark.parametrize("case", SENTENCEPIECE["strings"], ids=lambda case: ascii(case["text"][:20]))
def test_a_sentencepiece_vocabulary_cuts_text_as_sentencepiece_and_transformers_do(tmp_path: Path, case: dict) -> None:
    backend = read_vocab(write_sentencepiece(tmp_path / "tiny.gguf")).backend
    assert backend.encode(case["text"], add_special_tokens=False).ids == case["ids"]
    assert backend.encode(case["text"], add_special_tokens=True).ids == [1, *case["ids"]]
    assert backend.decode(case["ids"]) == case["text"]
    if not case["text"].startswith(" "):  # transformers 5 adds no space before a space, SentencePiece does
        assert hugging_face().encode(case["text"], add_special_tokens=False) == case["ids"]


def test_special_pieces_are_found_in_text_and_what_follows_begins_anew(tmp_path: Path) -> None:
    backend = read_vocab(write_sentencepiece(tmp_path / "tiny.gguf")).backend
    assert backend.encode("a</s>a<note>", add_special_tokens=False).tokens == ["▁a", "</s>", "▁a", "<note>"]


def test_a_vocabulary_without_the_leading_space_adds_none(tmp_path: Path) -> None:
    backend = read_vocab(write_sentencepiece(tmp_path / "tiny.gguf", prefix=False)).backend
    assert backend.encode("aa a", add_special_tokens=False).tokens == ["aa", "▁a"]
    assert backend.decode(backend.encode(" a", add_special_tokens=False).ids) == " a"


def test_special_tokens_and_templates_come_along(tmp_path: Path) -> None:
    vocab = read_vocab(write(tmp_path / "tiny.gguf", "smollm"))
    assert (vocab.bos_token_id, vocab.eos_token_ids) == (0, {1, 2})
    assert vocab.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    assert vocab.chat_templates == {"default": "plain", "tool_use": "tools"}
    assert vocab.backend.decode([0, 2], skip_special_tokens=True) == "<note>"


@pytest.mark.parametrize(
    ("pre", "model", "why"),
    [
        ("elvish", "gpt2", r"fix: use the model's Hugging.*, or a file with pre one of \['a.x-4.0'"),
        (None, "gpt2", "fix: use the model's Hugging.*, or a newer file: this one does not say how"),
        (
            "default",
            "llama",
            "fix: use the model's Hugging.*, or a file of model 'gpt2', 'gemma4', or 'llama' with scores",
        ),
        ("bert-bge", "bert", r"\(WordPiece, of embedding models\); fix: use the model's Hugging"),
        ("default", "t5", r"\(SentencePiece unigrams\); fix: use the model's Hugging"),
    ],
)
def test_an_unknown_kind_of_vocabulary_is_refused(tmp_path: Path, pre: str | None, model: str, why: str) -> None:
    with pytest.raises(ModelError, match=f"model '{model}', tokenizer.ggml.pre {pre!r}.*{why}"):
        read_vocab(write(tmp_path / "tiny.gguf", pre, model))


@pytest.mark.parametrize(("model", "pre", "begins"), [("gemma4", "", True), ("gpt2", "sarvam-moe", False)])
def test_a_vocabulary_of_texts_and_bytes_is_merged_across_words(
    tmp_path: Path, model: str, pre: str, begins: bool
) -> None:
    tokens = [
        "<pad>",
        "<bos>",
        "<end>",
        "\u2581",
        "a",
        "b",
        "\n",
        "a\u2581",
        "a\u2581b",
        "\n\n",
        "<0xC3>",
        "<0xA9>",
        "[PAD12]",
    ]
    writer = GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_tokenizer_model(model)
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges(["a \u2581", "a\u2581 b", "\n \n"])
    writer.add_token_types([CONTROL, CONTROL, CONTROL, *[NORMAL] * 7, BYTE, BYTE, USER_DEFINED])
    writer.add_bos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    backend = read_vocab(tmp_path / "tiny.gguf").backend
    text = "a b\n\n\n\u00e9<end>a"
    pieces = ["a\u2581b", "\n\n", "\n", "<0xC3>", "<0xA9>", "<end>", "a"]
    assert backend.encode(text).tokens == ["<bos>"] * begins + pieces
    assert backend.decode(backend.encode(text).ids, skip_special_tokens=False).removeprefix("<bos>") == text


def test_a_token_that_only_fills_the_vocabulary_is_not_found_in_text(tmp_path: Path) -> None:
    path = write_sentencepiece(tmp_path / "tiny.gguf", added=("[PAD{}]", "<note>"))
    tokens = read_vocab(path).backend.encode("[PAD]<note><unk>", add_special_tokens=False).tokens
    assert tokens[-2:] == ["<note>", "<unk>"]
    number = len(SENTENCEPIECE["pieces"])
    assert f"[PAD{number}]" not in read_vocab(path).backend.encode(f"[PAD{number}]", add_special_tokens=False).tokens


def test_the_tokens_of_phi_3_take_the_blanks_behind_them(tmp_path: Path) -> None:
    backend = read_vocab(write_sentencepiece(tmp_path / "tiny.gguf", architecture="phi3")).backend
    ids = backend.encode("<note>  a<s> a", add_special_tokens=False).ids
    assert [backend.id_to_token(id_) for id_ in ids] == ["<note>", "\u2581a", "<s>", "\u2581\u2581", "a"]


def test_any_cut_file_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "tiny.gguf", "smollm")
    size = len(whole.read_bytes())
    assert read_header(whole).metadata["tokenizer.ggml.tokens"] == TOKENS
    for length in range(1, size - 8, 7):
        whole.write_bytes(whole.read_bytes()[: size - length])
        with pytest.raises(ModelError):
            read_header(whole)


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 a zip", b"GGUF\x01\x00\x00\x00" + bytes(16)])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "other.gguf").write_bytes(data)
    with pytest.raises(ModelError, match="not a whole GGUF file"):
        read_header(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match="cannot be read"):
        read_header(tmp_path / "missing.gguf")
