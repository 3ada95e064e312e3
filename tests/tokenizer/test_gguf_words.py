"""Text is cut into words as the pre-tokenizer that a GGUF file names does."""

import pytest
from tokenizers import decoders

from jinfercept.tokenizer.gguf import CUTTERS, pre_tokenizer

TEXT = "HTTPServer camelCase's it'S 1234567\n\n  a \u00e9e\u0301 \u4e2d\u6587\u304b\ub098 \t!?\n12"
BYTE_LEVEL = sorted(name for name, cutter in CUTTERS.items() if cutter.byte_level)


@pytest.mark.parametrize(
    ("name", "text", "cut"),
    [
        ("gpt-2", "it's IT'S 123\n\n  a", "it|'s| IT|'|S| 123|\n\n | a"),
        ("starcoder", "it's 123", "it|'s| |1|2|3"),
        ("llama-bpe", "it'S 12345!\n\n  a", "it|'S| |123|45|!\n\n| | a"),
        ("qwen2", "it'S 12!\n\n  a", "it|'S| |1|2|!\n\n| | a"),
        ("qwen35", "a\u0301b \u0e44\u0e17\u0e49x", "a\u0301b| \u0e44\u0e17\u0e49x"),
        ("ufakzeka", "Ali'den it's", "Ali|'den| it|'s"),
        ("laguna", "a!?\n\nb", "a|!?|\n\n|b"),
        ("seed-coder", "a!?\n\nb", "a|!?|\n\n|b"),
        ("minicpm5", "a12345!\n", "a|123|45|!\n"),
        ("jais-2", "a" + " " * 13 + "b", "a|" + " " * 8 + "|" + " " * 4 + "| b"),
        ("exaone-moe", "an idea 12!\n\n", "an idea| |1|2|!\n|\n"),
        ("bailingmoe", "it'S 12\n\n", "it|'S| |1|2|\n\n"),
        ("deepseek-llm", "it's 123, \u4e2d\u6587\n\na", "it|'|s| |123|,| |\u4e2d\u6587|\n|\n|a"),
        ("deepseek-coder", "x+y 12\u4e2d", "x|+|y| |1|2|\u4e2d"),
        ("deepseek-v3", "a.b 12345\u4e2d\u304b\ub098", "a|.b| |123|45|\u4e2d\u304b|\ub098"),
        ("spark2_5", "a 123!\n", "a| |1|2|3|!|\n"),
        ("afmoe", "1234567 \u0e44\u0e41", "1|234|567| |\u0e44\u0e41"),
        ("youtu", "\ub098\u4e2d camelCase's", "\ub098|\u4e2d| camel|Case's"),
        ("tekken", "camelCase's 12", "camel|Case|'s| |1|2"),
        ("gpt-4o", "camelCase's 12345/\n", "camel|Case's| |123|45|/\n"),
        ("tiny_aya", "1234567 camelCase", "1|234|567| camel|Case"),
        ("kimi-k2", "\u4e2d\u6587\u304b 12345 camelCase's", "\u4e2d\u6587|\u304b| |123|45| camel|Case's"),
        ("superbpe", "by the way 1234567", "by the way |1|234|567"),
        ("bloom", "Hello, world (x)", "Hello|,| world| (|x|)"),
        ("viking", "ab12, c", "ab|1|2|,| c"),
        ("chameleon", "IMGIMGABZ a.b 12\n", "IMGIMGABZ| a|.|b| |1|2|\n"),
        ("falcon", "a,b ``x` 12345", "a|,|b| |``|x|`| |123|45"),
    ],
)
def test_text_is_cut_where_the_named_tokenizer_cuts(name: str, text: str, cut: str) -> None:
    pieces = [word for word, _ in pre_tokenizer(CUTTERS[name]).pre_tokenize_str(text)]
    assert [decoders.ByteLevel().decode([piece]) for piece in pieces] == cut.split("|")


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_no_text_is_lost_between_the_words(name: str) -> None:
    pieces = pre_tokenizer(CUTTERS[name]).pre_tokenize_str(TEXT)
    assert decoders.ByteLevel().decode([word for word, _ in pieces]) == TEXT


def test_falcon_tells_digits_among_the_stand_ins_of_bytes() -> None:
    pieces = [word for word, _ in pre_tokenizer(CUTTERS["falcon"]).pre_tokenize_str("5\u00b3\u00e9")]
    assert pieces == ["5", "\u00c2", "\u00b3", "\u00c3\u00a9"]
