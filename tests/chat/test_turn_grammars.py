"""Constraints that begin behind the reasoning, a token at a time."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jinfercept.chat.grammar.grammar import Grammars
from jinfercept.chat.parsers.reasoning import REASONING_FORMATS, Beginning
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.chat.turn_grammars import PerTurnGrammar
from jinfercept.errors import RequestError
from jinfercept.hooks import Constraint
from jinfercept.structured_outputs import StructuredOutputsParams
from tests.support.sample_tokenizers import MERGES, VOCAB

BEGINNINGS = {"a", "b", "c", "ab", "abc"}
MARKS = ["<think>", "</think>", "</think>\n", "</think>ab"]


def tokenizer_of(marks: list[str]) -> Tokenizer:
    """Single bytes, a few longer tokens, and these marks as tokens."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, MERGES)]
    backend = tokenizers.Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore
    backend.add_tokens(marks)
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, eos_token_ids=frozenset(backend.encode("<end>").ids))


def constraint(tokenizer: Tokenizer, *beginnings: Beginning, turns: int = 1, regex: str = "[a-c]{3}") -> Constraint:
    """Of one turn, the last of so many."""
    first, later = (*beginnings, *beginnings)[:2]
    grammar = Grammars(tokenizer, VOCAB).compile(StructuredOutputsParams(regex=regex))
    each = PerTurnGrammar((grammar, grammar), (first, later), REASONING_FORMATS["qwen3"], tokenizer)
    last = [each.constrain(tokenizer.eos_token_ids) for _ in range(turns)][-1]
    assert last is not None
    return last


def may_come(constraint: Constraint, tokenizer: Tokenizer) -> set[str]:
    words = constraint.allowed()
    return {
        tokenizer.token_text(token) for token in range(tokenizer.vocab_size) if words[token // 32] >> token % 32 & 1
    }


def take(constraint: Constraint, tokenizer: Tokenizer, text: str) -> None:
    for token in tokenizer.encode(text):
        assert constraint.allowed()[token // 32] >> token % 32 & 1, tokenizer.token_text(token)
        constraint.accept(token)


@pytest.mark.parametrize("marks", [[], MARKS[:2]])
def test_anything_but_the_end_may_be_thought(marks: list[str]) -> None:
    tokenizer = tokenizer_of(marks)
    matcher = constraint(tokenizer, "thinking")
    assert len(may_come(matcher, tokenizer)) == len({tokenizer.token_text(i) for i in range(tokenizer.vocab_size)}) - 1
    take(matcher, tokenizer, "x {<th</thi</think>")
    assert may_come(matcher, tokenizer) == BEGINNINGS
    assert not matcher.ended
    take(matcher, tokenizer, "abc")
    assert matcher.ended
    assert may_come(matcher, tokenizer) == {"<end>"}


@pytest.mark.parametrize("marks", [[], MARKS[:2]])
@pytest.mark.parametrize("regex", ["<tag>|[a-c]{3}", "[a-c]{3}"])
def test_a_turn_that_may_begin_with_either_goes_on_as_it_began(marks: list[str], regex: str) -> None:
    tokenizer = tokenizer_of(marks)
    for text in ("abc", "<think>ab</think>abc", *(("<tag>", "<think></think><tag>") if "<" in regex else ())):
        matcher = constraint(tokenizer, "undecided", regex=regex)
        take(matcher, tokenizer, text)
        assert matcher.ended
    begun = constraint(tokenizer, "undecided", regex=regex)
    assert may_come(begun, tokenizer) >= {*BEGINNINGS, "<think>" if marks else "<"}
    with pytest.raises(RequestError, match="does not allow"):
        begun.accept(tokenizer.encode("x")[0])


def test_text_in_the_token_that_closes_the_reasoning_is_the_answers() -> None:
    tokenizer = tokenizer_of(MARKS)
    for text, follows in (("</think>\n", BEGINNINGS), ("</think>ab", {"a", "b", "c"})):
        matcher = constraint(tokenizer, "thinking")
        [token] = [i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i) == text]
        matcher.accept(token)
        assert may_come(matcher, tokenizer) == follows


def test_every_turn_begins_as_its_prompt_says() -> None:
    tokenizer = tokenizer_of([])
    assert may_come(constraint(tokenizer, "thinking", "answering", turns=2), tokenizer) == BEGINNINGS
    assert len(may_come(constraint(tokenizer, "answering", "thinking", turns=2), tokenizer)) > 100
