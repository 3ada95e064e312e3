"""Vocabularies of published models give the ids that their publishers' tokenizers give, or are refused by name.

The vocabularies, the texts and their ids are those in the source package of llama-cpp-python.
"""

import tarfile
from pathlib import Path
from unicodedata import is_normalized

import pytest

from jinfercept.chat.tokenizer.gguf import GGUFVocab, read_vocab
from jinfercept.errors import ModelError
from tests.support.fetched_packages import published_package

PREFIX = "ggml-vocab-"
REFUSED = {
    "aquila": "tokenizer.ggml.pre None.*does not say how its text is cut into words",
    "gpt-neox": "tokenizer.ggml.pre None.*does not say how its text is cut into words",
    "falcon": "tokenizer.ggml.pre 'falcon'.*a file with pre one of",
    "bert-bge": r"model 'bert'.*\(WordPiece, of embedding models\)",
    "nomic-bert-moe": r"model 't5'.*\(SentencePiece unigrams\)",
}
WITHOUT_TEXTS = {"baichuan"}  # a plain SentencePiece vocabulary
EXACT = {
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "gemma-4",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
} | {
    "phi-3",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
}


def vocab_in(path: Path) -> GGUFVocab:
    vocab = read_vocab(path)
    assert vocab is not None
    return vocab


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The vocabularies, the texts and their ids."""
    path = tmp_path_factory.mktemp("vocabularies")
    with tarfile.open(published_package()) as package:
        for member in package:
            if (name := member.name.rpartition("/")[2]).startswith(PREFIX):
                (path / name).write_bytes(package.extractfile(member).read())  # pyright: ignore[reportOptionalMemberAccess]
    return path


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_every_published_vocabulary_is_accounted_for(folder: Path) -> None:
    names = {path.stem.removeprefix(PREFIX) for path in folder.glob("*.gguf")}
    assert names == {*REFUSED, *EXACT, *WITHOUT_TEXTS}


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", sorted(EXACT))
def test_a_published_vocabulary_gives_its_publishers_ids(folder: Path, name: str) -> None:
    file = folder / f"{PREFIX}{name}.gguf"
    texts = Path(f"{file}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    ids = [[int(word) for word in line.split()] for line in Path(f"{file}.out").read_text().split("\n")]
    # llama.cpp's ids for Qwen 3.5 keep texts as they are, where transformers' tokenizer writes them in normal form C
    pairs = [pair for pair in zip(texts, ids, strict=False) if name != "qwen35" or is_normalized("NFC", pair[0])]
    backend = vocab_in(file).backend
    assert [backend.encode(text, add_special_tokens=False).ids for text, _ in pairs] == [tokens for _, tokens in pairs]
    assert len(pairs) >= 40


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_published_vocabulary_that_cannot_be_exact_is_refused_by_name(folder: Path, name: str) -> None:
    with pytest.raises(ModelError, match=REFUSED[name]):
        vocab_in(folder / f"{PREFIX}{name}.gguf")


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", sorted(WITHOUT_TEXTS))
def test_a_published_vocabulary_without_texts_reads_back_what_it_writes(folder: Path, name: str) -> None:
    backend = vocab_in(folder / f"{PREFIX}{name}.gguf").backend
    text = "Hello, world!  \u4f60\u597d\uff0c\u4e16\u754c \U0001f642 3.14\n"
    assert backend.decode(backend.encode(text, add_special_tokens=False).ids) == text
