"""Grammars of a chat's turns: one for its first turn and one for later ones, each of which begins behind the turn's reasoning.

Within the reasoning, which is free, only the tokens that end a text are forbidden, so that the answer follows unless the output
is cut off.
"""

from typing import Any, final

import numpy as np
from jaxtyping import UInt32

from jinfercept.hooks import Constraint, Grammar
from jinfercept.parsers.reasoning import Beginning, ReasoningFormat
from jinfercept.tokenizer.detokenizer import IncrementalDetokenizer
from jinfercept.tokenizer.tokenizer import Tokenizer


@final
class PerTurnGrammar:
    """A `Grammar` for one request.

    Args:
        later: the grammar of all others; None if they are free.
    """

    def __init__(self, first: Grammar, later: Grammar | None) -> None:
        self._next: Grammar | None = first
        self._first, self._later = first, later

    def anew(self) -> "PerTurnGrammar":
        """The same for another request, whose first turn is still to come."""
        return PerTurnGrammar(self._first, self._later)

    def constrain(self, end_token_ids: frozenset[int]) -> Constraint | None:
        """The constraint of the next turn; see `hooks.Grammar`."""
        turn, self._next = self._next, self._later
        return None if turn is None else turn.constrain(end_token_ids)


@final
class AfterReasoning:
    """A `Grammar` of turns that may begin with reasoning.

    Args:
        grammar: the grammar of the answer.
        format: the marks of reasoning.
    """

    def __init__(self, grammar: Grammar, format: ReasoningFormat, beginning: Beginning, tokenizer: Tokenizer) -> None:
        self._grammar, self._format, self._tokenizer = grammar, format, tokenizer
        self._beginning: Beginning = beginning

    def constrain(self, end_token_ids: frozenset[int]) -> Constraint | None:
        """The constraint of a turn; see `hooks.Grammar`."""
        if self._beginning == "answering":
            return self._grammar.constrain(end_token_ids)
        return _ReasoningConstraint(self._grammar, self._format, self._beginning, self._tokenizer, end_token_ids)


class _ReasoningConstraint:
    """The constraint of one turn. An undecided turn may begin with reasoning or with its answer.

    Attributes:
        ended: only the end can follow.
    """

    def __init__(
        self,
        grammar: Grammar,
        format: ReasoningFormat,
        beginning: Beginning,
        tokenizer: Tokenizer,
        ends: frozenset[int],
    ) -> None:
        self._grammar, self._at, self._tokenizer, self._ends = grammar, beginning, tokenizer, ends
        self._opening, self._closing = tokenizer.encode(format.opening), format.closing
        self._answer = self._begin()
        self._may_answer = True  # undecided: the text so far may begin an answer too
        self._num_opened = 0  # tokens of the opening mark
        self._detokenizer, self._text = IncrementalDetokenizer(tokenizer, skip_special_tokens=False), ""
        self.ended = False

    def _begin(self) -> Constraint:
        answer = self._grammar.constrain(self._ends)
        assert answer is not None, "no constraint behind the reasoning"
        return answer

    def allowed(self) -> UInt32[np.ndarray, "words"]:
        """The tokens that may come next; see `hooks.Constraint`."""
        words = self._answer.allowed()
        if self._at == "answering":
            self.ended = self._answer.ended
            return words
        if self._at == "thinking":
            free = np.full_like(words, 0xFFFFFFFF)
            for token_id in self._ends:
                if 0 <= token_id < 32 * len(free):
                    free[token_id // 32] &= ~_bit(token_id)
            return free
        words = words.copy() if self._may_answer else np.zeros_like(words)
        token_id = self._opening[self._num_opened]
        words[token_id // 32] |= _bit(token_id)
        return words

    def accept(self, token_id: int) -> None:
        """The next generated token. Raises `RequestError` if it is not allowed."""
        if self._at == "thinking":
            self._think(token_id)
        elif self._at == "undecided" and token_id == self._opening[self._num_opened]:
            self._open(token_id)
        else:
            self._at = "answering"
            self._accept(token_id)

    def _open(self, token_id: int) -> None:
        """The next token of the opening mark, which an answer may begin with too."""
        self._num_opened += 1
        if self._num_opened == len(self._opening):
            self._at, self._answer = "thinking", self._begin()
        elif self._may_answer and self._answer.allowed()[token_id // 32] & _bit(token_id):
            self._answer.accept(token_id)
        else:
            self._may_answer = False

    def _think(self, token_id: int) -> None:
        self._text += self._detokenizer.add(token_id)
        _, mark, after = self._text.partition(self._closing)
        self._text = self._text[1 - len(self._closing) :]
        if mark:
            self._at = "answering"
            for answer_id in self._tokenizer.encode(after.lstrip(), plain=True):
                self._accept(answer_id)

    def _accept(self, token_id: int) -> None:
        self._answer.accept(token_id)
        self.ended = self._answer.ended


def _bit(token_id: int) -> Any:
    return np.uint32(1 << token_id % 32)
