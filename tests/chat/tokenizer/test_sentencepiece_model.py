"""Vocabularies out of `tokenizer.model`: the library's ids, the settings beside it, and files that cannot be read."""

import json
from pathlib import Path
from typing import Any

import pytest

from jinfercept.chat.tokenizer.load import load_tokenizer
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.errors import ModelError

GOLDEN = Path(__file__).parents[2] / "golden"
WHOLE = (GOLDEN / "sentencepiece.model").read_bytes()
STRINGS = json.loads((GOLDEN / "sentencepiece.json").read_text(encoding="utf-8"))["strings"]
SIZE = 420


def read(directory: Path, data: bytes = WHOLE, **settings: object) -> Tokenizer:
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "tokenizer.model").write_bytes(data)
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    return tokenizer


def test_ids_and_text_are_those_of_sentencepiece(tmp_path: Path) -> None:
    tokenizer = read(tmp_path)
    for string in STRINGS:
        if "<s>" not in string["text"] and string["text"]:
            assert tokenizer.encode(string["text"]) == string["ids"], string["text"]
    assert tokenizer.decode(tokenizer.encode("Hello, world")) == "Hello, world"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, {2})
    assert tokenizer.encode("a", add_special_tokens=True)[0] == 1


def test_settings_beside_the_file_are_those_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, SIZE + 1]}))
    tokenizer = read(
        tmp_path,
        add_bos_token=False,
        add_eos_token=True,
        eos_token="</s>",
        pad_token="<pad>",
        added_tokens_decoder={
            str(SIZE): {"content": "<pad>", "special": True},
            str(SIZE + 1): {"content": "<|im_end|>", "special": True},
        },
        chat_template="{{ messages[0].content }}{{ eos_token }}",
    )
    assert tokenizer.encode("a<|im_end|><pad>") == [*tokenizer.encode("a"), SIZE + 1, SIZE]
    assert tokenizer.encode("a", add_special_tokens=True) == [*tokenizer.encode("a"), 2]
    assert tokenizer.eos_token_ids == {2, SIZE + 1}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}]) == "Hi</s>"


def test_tokens_of_an_older_file_keep_their_ids(tmp_path: Path) -> None:
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<end>": SIZE + 1, "<pad>": SIZE}))
    assert read(tmp_path).encode("<end><pad>") == [SIZE + 1, SIZE]


@pytest.mark.parametrize(("legacy", "number"), [(True, 2), (False, 1)])
def test_only_legacy_puts_a_space_behind_special_tokens(tmp_path: Path, legacy: bool, number: int) -> None:
    ids = read(tmp_path, legacy=legacy).encode("a</s>a")
    assert ids.count(read(tmp_path).encode("a")[0]) == number


@pytest.mark.parametrize("data", [b"", WHOLE[:-3], b"IQ== 0\nIg== 1\n", b"\x00" * 100, b"\xff" * 100])
def test_a_damaged_vocabulary_is_a_model_error(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ModelError, match=r"(?s)the tokenizer cannot be read.*save_pretrained"):
        read(tmp_path, data)


@pytest.mark.parametrize(
    "settings",
    [
        {"added_tokens_decoder": {"9": {"content": "x"}}},
        {"added_tokens_decoder": {str(SIZE + 1): {"content": "<pad>"}}},
        {"chat_template": 7},
        {"bos_token": {"id": 1}},
        {"eos_token": "none"},
    ],
)
def test_settings_that_fit_nothing_are_a_model_error(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"(?s)the tokenizer cannot be read.*save_pretrained"):
        read(tmp_path, **settings)
