"""What is measured of long turns is what it says."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from benchmarks.long_turns import PROTOCOLS, make_work, measure, with_template


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_turn_has_the_same_prompt_in_every_way_but_for_what_the_model_wrote(protocol: str) -> None:
    vocab = {char: id_ for id_, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore
    tokenizer = with_template(backend, "<|im_start|>", "<|im_end|>")
    ways = {way: tokens for way, _, tokens in measure(tokenizer, protocol, make_work("word " * 4000, 3_000), 1)}
    assert ways["whole"] == ways["again"] > 15_000
    assert 0 < abs(ways["continued"] - ways["again"]) < 1000
