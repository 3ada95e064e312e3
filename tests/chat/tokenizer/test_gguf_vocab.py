"""Vocabularies out of small GGUF files, of every kind that can be built, and files that cannot be read."""

import functools
import json
from pathlib import Path

import pytest
from gguf import GGUFWriter
from tokenizers import decoders

from jinfercept.chat.tokenizer.gguf import CUTTERS, GGUFVocab, pre_tokenizer, read_vocab
from jinfercept.chat.tokenizer.load import load_tokenizer
from jinfercept.errors import ModelError
from jinfercept.models.gguf_header import read_header
from tests.support import tiny_gguf

TEXT = "HTTPServer camelCase's it'S 1234567\n\n  a \u00e9e\u0301 \u4e2d\u6587\u304b\ub098 \t!?\n12"


@pytest.mark.parametrize(
    ("name", "text", "cut"),
    [
        ("gpt-2", "it's IT'S 123\n\n  a", "it|'s| IT|'|S| 123|\n\n | a"),
        ("starcoder", "it's 123", "it|'s| |1|2|3"),
        ("llama-bpe", "it'S 12345!\n\n  a", "it|'S| |123|45|!\n\n| | a"),
        ("qwen2", "it'S 12!\n\n  a", "it|'S| |1|2|!\n\n| | a"),
        ("qwen35", "a\u0301b \u0e44\u0e17\u0e49x", "a\u0301b| \u0e44\u0e17\u0e49x"),
        ("ufakzeka", "Ali'den it's", "Ali|'den| it|'s"),
        ("seed-coder", "a!?\n\nb", "a|!?|\n\n|b"),
        ("minicpm5", "a12345!\n", "a|123|45|!\n"),
        ("deepseek-llm", "it's 123, \u4e2d\u6587\n\na", "it|'|s| |123|,| |\u4e2d\u6587|\n|\n|a"),
        ("deepseek-coder", "x+y 12\u4e2d", "x|+|y| |1|2|\u4e2d"),
        ("tekken", "camelCase's 12", "camel|Case|'s| |1|2"),
        ("gpt-4o", "camelCase's 12345/\n", "camel|Case's| |123|45|/\n"),
        ("superbpe", "by the way 1234567", "by the way |1|234|567"),
        ("viking", "ab12, c", "ab|1|2|,| c"),
    ],
)
def test_text_is_cut_where_the_named_tokenizer_cuts(name: str, text: str, cut: str) -> None:
    pieces = [word for word, _ in pre_tokenizer(CUTTERS[name]).pre_tokenize_str(text)]
    assert [decoders.ByteLevel().decode([piece]) for piece in pieces] == cut.split("|")


@pytest.mark.parametrize("name", sorted(CUTTERS))
def test_no_text_is_lost_between_the_words(name: str) -> None:
    pieces = pre_tokenizer(CUTTERS[name]).pre_tokenize_str(TEXT)
    assert decoders.ByteLevel().decode([word for word, _ in pieces]) == TEXT


TOKENS = ["<|begin|>", "<|end|>", "<note>", *"abĠ123'SĊ", "ab", "Ġa", "12", "123", "'S"]
MERGES = ["Ġ a", "a b", "1 2", "' S"]  # "123" is a token that no merge makes
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
SENTENCEPIECE = json.loads((Path(__file__).parents[2] / "golden" / "sentencepiece.json").read_text(encoding="utf-8"))


def vocab_in(path: Path) -> GGUFVocab:
    vocab = read_vocab(path)
    assert vocab is not None
    return vocab


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
    backend = vocab_in(write(tmp_path / "tiny.gguf", pre)).backend
    assert backend.encode(text, add_special_tokens=False).tokens == pieces
    assert backend.decode(backend.encode(text).ids, skip_special_tokens=False).removeprefix("<|begin|>") == text


@pytest.mark.parametrize(
    ("pre", "add_bos", "first"),
    [("gpt-2", None, "a"), ("llama-bpe", None, "<|begin|>"), ("llama-bpe", False, "a"), ("smollm", True, "<|begin|>")],
)
def test_the_begin_token_is_the_files_or_its_kinds_to_decide(
    tmp_path: Path, pre: str, add_bos: bool | None, first: str
) -> None:
    backend = vocab_in(write(tmp_path / "tiny.gguf", pre, add_bos=add_bos)).backend
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
    backend = vocab_in(write_sentencepiece(tmp_path / "tiny.gguf")).backend
    assert backend.encode(case["text"], add_special_tokens=False).ids == case["ids"]
    assert backend.encode(case["text"], add_special_tokens=True).ids == [1, *case["ids"]]
    assert backend.decode(case["ids"]) == case["text"]
    if not case["text"].startswith(" "):  # transformers 5 adds no space before a space, SentencePiece does
        assert hugging_face().encode(case["text"], add_special_tokens=False) == case["ids"]


def test_special_pieces_are_found_in_text_and_what_follows_begins_anew(tmp_path: Path) -> None:
    backend = vocab_in(write_sentencepiece(tmp_path / "tiny.gguf")).backend
    assert backend.encode("a</s>a<note>", add_special_tokens=False).tokens == ["▁a", "</s>", "▁a", "<note>"]


def test_a_vocabulary_without_the_leading_space_adds_none(tmp_path: Path) -> None:
    backend = vocab_in(write_sentencepiece(tmp_path / "tiny.gguf", prefix=False)).backend
    assert backend.encode("aa a", add_special_tokens=False).tokens == ["aa", "▁a"]
    assert backend.decode(backend.encode(" a", add_special_tokens=False).ids) == " a"


def test_special_tokens_and_templates_come_along(tmp_path: Path) -> None:
    vocab = vocab_in(write(tmp_path / "tiny.gguf", "smollm"))
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
        vocab_in(write(tmp_path / "tiny.gguf", pre, model))


def test_a_vocabulary_of_texts_and_bytes_is_merged_across_words(tmp_path: Path) -> None:
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
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a \u2581", "a\u2581 b", "\n \n"])
    writer.add_token_types([CONTROL, CONTROL, CONTROL, *[NORMAL] * 7, BYTE, BYTE, USER_DEFINED])
    writer.add_bos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    backend = vocab_in(tmp_path / "tiny.gguf").backend
    text = "a b\n\n\n\u00e9<end>a"
    pieces = ["a\u2581b", "\n\n", "\n", "<0xC3>", "<0xA9>", "<end>", "a"]
    assert backend.encode(text).tokens == ["<bos>", *pieces]
    assert backend.decode(backend.encode(text).ids, skip_special_tokens=False).removeprefix("<bos>") == text


def test_a_token_that_only_fills_the_vocabulary_is_not_found_in_text(tmp_path: Path) -> None:
    path = write_sentencepiece(tmp_path / "tiny.gguf", added=("[PAD{}]", "<note>"))
    tokens = vocab_in(path).backend.encode("[PAD]<note><unk>", add_special_tokens=False).tokens
    assert tokens[-2:] == ["<note>", "<unk>"]
    number = len(SENTENCEPIECE["pieces"])
    assert f"[PAD{number}]" not in vocab_in(path).backend.encode(f"[PAD{number}]", add_special_tokens=False).tokens


def test_the_tokens_of_phi_3_take_the_blanks_behind_them(tmp_path: Path) -> None:
    backend = vocab_in(write_sentencepiece(tmp_path / "tiny.gguf", architecture="phi3")).backend
    ids = backend.encode("<note>  a<s> a", add_special_tokens=False).ids
    assert [backend.id_to_token(id_) for id_ in ids] == ["<note>", "\u2581a", "<s>", "\u2581\u2581", "a"]


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 a zip", b"GGUF\x01\x00\x00\x00" + bytes(16)])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "other.gguf").write_bytes(data)
    with pytest.raises(ModelError, match="not a whole GGUF file"):
        read_header(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match="cannot be read"):
        read_header(tmp_path / "missing.gguf")


def test_a_file_without_a_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "m.gguf", extra={"tokenizer.ggml.model": "none"})
    assert load_tokenizer(tmp_path / "m.gguf") is None
