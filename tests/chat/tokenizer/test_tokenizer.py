"""The embedded model's tokenizer against transformers' (golden), SentencePiece-like ones, decoding token by token."""

import json
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models

from jinfercept.chat.tokenizer.decoding import IncrementalDetokenizer
from jinfercept.chat.tokenizer.load import load_tokenizer
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.errors import ModelError, RequestError
from tests.support.sample_tokenizers import backend_of, sentencepiece, smollm2

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "smollm2_tokenizer.json").read_text(encoding="utf-8"))
TEXTS = st.text(  # SmolLM2's vocabulary has no tokens for six control characters and for the planes above the third
    st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs"], exclude_characters="\x04\x06\x13\x14\x16\x1d")
)
END = 2  # <|im_end|>


@cache
def backends() -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
    """The library's own, of both kinds."""
    return backend_of(smollm2()), backend_of(sentencepiece())


def stream(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    return [*map(detokenizer.add, ids), detokenizer.flush()]


@pytest.mark.parametrize("case", GOLDEN["strings"], ids=lambda case: ascii(case["text"][:20]))
def test_ids_and_text_are_those_of_transformers(case: dict) -> None:
    assert smollm2().encode(case["text"]) == case["ids"]
    assert smollm2().decode(case["ids"], skip_special_tokens=False) == case["decoded"]


@pytest.mark.parametrize("case", GOLDEN["chats"], ids=lambda case: f"{len(case['messages'])} messages")
def test_chats_are_rendered_as_transformers_renders_them(case: dict) -> None:
    text = smollm2().apply_chat_template(case["messages"], add_generation_prompt=case["add_generation_prompt"])
    assert text == case["text"]
    assert smollm2().encode(text) == case["ids"]


def test_special_tokens_come_from_the_file() -> None:
    tokenizer = smollm2()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (1, {END}, 49152)
    assert tokenizer.special_ids == set(range(17))
    assert tokenizer.token_text(END) == "<|im_end|>"
    assert tokenizer.encode("a", add_special_tokens=True) == tokenizer.encode("a")


@given(TEXTS)
@example("▁")
@example(" a▁ b▁")
def test_a_text_survives_encoding_and_decoding(text: str) -> None:
    for tokenizer, written in ((smollm2(), text), (sentencepiece(), text.replace("▁", " "))):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == written


@given(st.lists(st.integers(0, 49_200)), st.booleans())
def test_any_ids_decode_as_the_library_decodes_them(ids: list[int], skip_special_tokens: bool) -> None:
    expected = backends()[0].decode(ids, skip_special_tokens=skip_special_tokens)
    assert smollm2().decode(ids, skip_special_tokens) == expected


@given(TEXTS)
def test_sentencepiece_text_decodes_as_the_library_decodes_it(text: str) -> None:
    ids = sentencepiece().encode(text)
    assert sentencepiece().decode(ids) == backends()[1].decode(ids)


@given(TEXTS)
@example("▁")
def test_a_stream_never_shows_half_a_character(text: str) -> None:
    for tokenizer, written in ((smollm2(), text), (sentencepiece(), text.replace("▁", " "))):
        shown = ""
        for piece in stream(tokenizer, tokenizer.encode(text), skip_special_tokens=False):
            shown += piece
            assert written.startswith(shown)
        assert shown == written


@given(st.lists(st.integers(0, 300)), st.booleans())
def test_a_stream_of_any_ids_is_their_text(ids: list[int], skip_special_tokens: bool) -> None:
    for tokenizer in (smollm2(), sentencepiece()):
        assert "".join(stream(tokenizer, ids, skip_special_tokens)) == tokenizer.decode(ids, skip_special_tokens)


def test_a_character_is_shown_with_its_last_byte() -> None:
    ids = smollm2().encode("日")
    assert len(ids) > 1
    assert stream(smollm2(), ids) == [*[""] * (len(ids) - 1), "日", ""]
    assert stream(smollm2(), ids[:-1])[-1] == "\ufffd"


def test_only_the_first_leading_space_of_a_text_is_the_vocabularys() -> None:
    ids = [sentencepiece().encode("a")[0]] * 2  # ▁a ▁a
    assert stream(sentencepiece(), ids) == ["a", " a", ""]


def test_special_tokens_are_left_out_on_request() -> None:
    ids = smollm2().encode("hi<|im_end|>")
    assert stream(smollm2(), ids) == ["hi", "", ""]
    assert stream(smollm2(), ids, skip_special_tokens=False) == ["hi", "<|im_end|>", ""]


def test_half_a_surrogate_pair_is_the_requests_mistake() -> None:
    with pytest.raises(RequestError, match="lone surrogates"):
        smollm2().encode("a\ud800")


def test_messages_that_the_template_cannot_read_are_the_requests_mistake() -> None:
    with pytest.raises(RequestError, match="chat template does not take"):
        smollm2().apply_chat_template([{"role": "user"}])


def test_a_template_for_tools_is_used_when_there_are_tools() -> None:
    templates = {"default": "{{ messages[0].content }}{{ eos_token }}", "tool_use": "{{ tools | tojson }}"}
    tokenizer = Tokenizer(backend_of(sentencepiece()), special_tokens={"eos_token": "</s>"}, chat_templates=templates)
    messages = [{"role": "user", "content": "é"}]
    assert tokenizer.apply_chat_template(messages) == "é</s>"
    assert tokenizer.apply_chat_template(messages, tools=[{"type": "function"}]) == '[{"type": "function"}]'


def test_a_decoder_that_cannot_be_streamed_is_refused() -> None:
    backend = tokenizers.Tokenizer(models.WordPiece(vocab={"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ModelError, match="cannot be streamed"):
        Tokenizer(backend)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint's directory with the embedded model's vocabulary in Hugging Face's form."""
    backend_of(smollm2()).save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    return tmp_path


def test_a_directory_gives_the_same_tokenizer(directory: Path) -> None:
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    for case in GOLDEN["strings"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, {0, 2})
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "<|im_start|>hi"


def test_the_tokenizer_of_gptj_is_read_from_the_files_that_it_was_published_with(tmp_path: Path) -> None:
    words = ["<|endoftext|>", *"abĠ12", "ab", "Ġa"]
    (tmp_path / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\nĠ a\n", encoding="utf-8")
    settings = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 2048, "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("ab a12<|endoftext|>") == [6, 7, 4, 5, 0]
    assert tokenizer.decode([6, 7, 4, 0, 50_300]) == "ab a1"  # ids beyond the vocabulary pad the model's logits
    assert tokenizer.eos_token_ids == {0}
    with pytest.raises(ModelError, match="no chat template"):
        tokenizer.chat_template()


def test_a_checkpoint_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    assert load_tokenizer(None) is None
