"""A text that is encoded segment by segment has the tokens of the whole, whatever the vocabulary does at borders."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from random import Random
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jinfercept.chat.tokenizer.special_tokens import Rendered, cutting_names
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.errors import RequestError
from tests.support.sample_tokenizers import byte_backend, sentencepiece, smollm2

NAMES = ("<|start|>", "<|end|>", "<s>", "</s>")
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NORMALIZERS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "NFC": normalizers.NFC,
    "NFKC, lower": lambda: normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
    "Llama 2": lambda: normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    "strip": lambda: normalizers.Sequence([normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]),
}
PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "bytes": lambda: pre_tokenizers.ByteLevel(add_prefix_space=True),
    "Llama 3": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "first": lambda: pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
    "always": lambda: pre_tokenizers.Metaspace(prepend_scheme="always"),
    "words": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation(), pre_tokenizers.Digits(individual_digits=True)]
    ),
}
PIECES = (
    *NAMES,
    *(
        "<|",
        "|>",
        "<|start",
        "end|>",
        "s>",
        "<",
        "</",
        "word",
        "words",
        "a b",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t \n",
        "\u3000",
    ),
    *(
        "e",
        "\u0301",
        "é",
        "\u1100",
        "\u1161",
        "ﬁ",
        "Å",
        "▁",
        "12",
        "3456",
        "'s",
        "don't",
        "\U0001f468\u200d\U0001f469",
        "[x]",
    ),
)


@cache
def drawn_vocabulary(normalizer: str, pre_tokenizer: str) -> Tokenizer:
    """Merges of pieces, over bytes and the characters of these pieces."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if (part := NORMALIZERS[normalizer]()) is not None:
        backend.normalizer = part
    if (part := PRE_TOKENIZERS[pre_tokenizer]()) is not None:
        backend.pre_tokenizer = part
    random = Random(0)
    texts = ["".join(random.choices(PIECES[4:], k=12)) for _ in range(200)]
    alphabet = [*pre_tokenizers.ByteLevel.alphabet()]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=alphabet,
        special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.decoder = decoders.ByteLevel()  # pyright: ignore # any that is known: nothing is decoded
    backend.add_special_tokens([*NAMES])
    backend.add_tokens([AddedToken("[x]", normalized=True), AddedToken("word", normalized=True)])
    source = "".join(NAMES)
    ends = frozenset(backend.encode("<|end|>", add_special_tokens=False).ids)
    return Tokenizer(backend, eos_token_ids=ends, chat_templates={"default": source})


def drawn_text(random: Random) -> str:
    return "".join(random.choices(PIECES, k=random.randint(1, 24)))


def drawn_breaks(random: Random, text: str) -> list[int]:
    """Places within some of the names, which are literal then, and beside some."""
    places = [place for place in range(1, len(text)) if text[place - 1] == "<" or text[place] == ">"]
    return sorted(random.sample(places, random.randint(0, len(places))))


def whole(tokenizer: Tokenizer, text: str, breaks: Sequence[int]) -> list[int]:
    own = tokenizer.special_token_names.own(text, breaks) if breaks else None
    return (
        tokenizer.encode(text)
        if own is None
        else tokenizer.encode_segments([tokenizer._literal_backend().aliased(text, own)])[0]
    )


def check(tokenizer: Tokenizer, random: Random, rounds: int) -> int:
    """Conversations that grow, fork and are edited; returns how many segments they had."""
    number = 0
    for _ in range(rounds):
        texts = [drawn_text(random) for _ in range(random.randint(1, 6))]
        for _ in range(3):
            text = "".join(texts)
            breaks = drawn_breaks(random, text) if random.random() < 0.5 else []
            segments = tokenizer.segments(Rendered(text, tuple(breaks)))
            number += len(segments)
            assert [id_ for ids in tokenizer.encode_segments(segments) for id_ in ids] == whole(tokenizer, text, breaks)
            texts[random.randrange(len(texts))] += drawn_text(random)
            texts.append(drawn_text(random))
    return number


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer"),
    [("nothing", "Llama 3"), ("NFC", "bytes"), ("Llama 2", "nothing"), ("NFKC, lower", "first"), ("strip", "always")],
)
def test_segments_have_the_tokens_of_the_whole(normalizer: str, pre_tokenizer: str) -> None:
    assert check(drawn_vocabulary(normalizer, pre_tokenizer), Random(1), 40) > 500


@cache
def unigrams() -> Tokenizer:
    """T5's kind: the likeliest pieces of words that begin with an underscore."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])  # pyright: ignore
    backend.pre_tokenizer = pre_tokenizers.Metaspace()  # pyright: ignore
    backend.decoder = decoders.Metaspace()  # pyright: ignore
    random = Random(0)
    texts = ["".join(random.choices(PIECES[4:], k=12)) for _ in range(200)]
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens([*NAMES])
    return Tokenizer(backend, chat_templates={"default": "".join(NAMES)})


@pytest.mark.parametrize("tokenizer", [smollm2, sentencepiece, unigrams])
def test_segments_of_published_kinds_have_the_tokens_of_the_whole(tokenizer: Callable[[], Tokenizer]) -> None:
    check(tokenizer(), Random(2), 20)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("normalizer", "pre_tokenizer"), product(NORMALIZERS, PRE_TOKENIZERS))
def test_segments_have_the_tokens_of_the_whole_in_every_kind_of_vocabulary(normalizer: str, pre_tokenizer: str) -> None:
    for seed in range(3):
        check(drawn_vocabulary(normalizer, pre_tokenizer), Random(seed), 100)


class WholeText:
    """A pre-tokenizer in Python."""

    def pre_tokenize(self, pretokenized: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("added", "cutting"),
    [
        ([AddedToken("<a>"), AddedToken("<b>", special=False)], {"<a>", "<b>"}),
        ([AddedToken("<a>", lstrip=True), AddedToken("<b>", rstrip=True), AddedToken(" <c>")], set()),
        ([AddedToken("<a>"), AddedToken("<b>", single_word=True)], set()),
        ([AddedToken("<a>"), AddedToken("<a><b>")], set()),  # the longer one wins
        ([AddedToken("<a>"), AddedToken("b<")], {"b<"} - {"b<"}),  # either may overlap the other
        ([AddedToken("<a>"), AddedToken("a"), AddedToken("<b>")], {"<b>"}),
        ([AddedToken("<<"), AddedToken("<a>")], set()),  # it overlaps itself
    ],
)
def test_only_names_that_no_other_token_disturbs_cut(added: list[AddedToken], cutting: set[str]) -> None:
    backend = byte_backend((), [*added], use_regex=True)
    assert cutting_names(backend, ["<a>", "<b>", " <c>", "<a><b>", "b<", "<<", "no token"]) == cutting


def test_a_name_that_is_searched_in_normalised_text_cuts_if_nothing_is_normalised() -> None:
    backend = byte_backend(use_regex=True)
    backend.add_tokens([AddedToken("<a>", normalized=True)])
    assert cutting_names(backend, ["<a>"]) == {"<a>"}
    backend.normalizer = normalizers.Sequence([])  # pyright: ignore
    assert cutting_names(backend, ["<a>"]) == {"<a>"}
    backend.normalizer = normalizers.NFC()  # pyright: ignore
    assert cutting_names(backend, ["<a>"]) == set()


def test_nothing_cuts_where_whole_texts_are_looked_at_or_tokens_are_drawn() -> None:
    backend = byte_backend((), [AddedToken("<a>")], use_regex=True)
    backend.model = models.BPE(vocab={"a": 0}, merges=[], dropout=0.5)  # pyright: ignore
    assert cutting_names(backend, ["<a>"]) == set()
    backend = byte_backend((), [AddedToken("<a>")], use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(WholeText())  # pyright: ignore
    assert cutting_names(backend, ["<a>"]) == set()


def test_half_a_surrogate_pair_is_refused() -> None:
    tokenizer = smollm2()
    with pytest.raises(RequestError, match="not valid Unicode"):
        tokenizer.encode_segments(tokenizer.segments("<|im_start|>a<|im_end|>\ud800"))
