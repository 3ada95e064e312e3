"""Grammars over bytes."""

import pytest

from jinfercept.chat.grammar.grammar import Grammars
from tests.support.sample_tokenizers import VOCAB, byte_level


@pytest.fixture(scope="module")
def byte_grammars() -> Grammars:
    return Grammars(byte_level(), VOCAB)
