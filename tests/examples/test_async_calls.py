"""The demo and the training of asynchronous calls: sound dialogues, only the agent's tokens learnt, a lower loss."""

import random
import re
from io import StringIO
from itertools import islice
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from examples.async_calls import demo, evaluate, train
from examples.async_calls.dialogues import (
    IDS,
    Codec,
    Mode,
    Tokens,
    delays,
    dialogues,
    interrupt,
    script,
    weave,
    woven,
)
from examples.async_calls.learning import batch, logits, pack
from jinfercept import LLM, SamplingParams
from jinfercept.chat.parsers import cml
from jinfercept.chat.parsers.python_calls import parse_call
from jinfercept.errors import ModelError
from jinfercept.events import Intercepted, Resumed, Token
from jinfercept.models.joined_weights import separate
from jinfercept.models.load import load


def test_lanes_show_when_the_model_waits_and_when_a_call_runs() -> None:
    lanes = demo.Lanes(began_s=0.0, ended_s=6.0)
    lanes.note(Token("r", 1, "one\ntwo"))
    lanes.note(Intercepted("r", ()))
    lanes.note(Resumed("r", (), (2,), "[INTR]"))
    lanes.waits, lanes.calls["f()"] = [demo.Span(2.0, 4.0)], demo.Span(1.0, 4.0)
    file = StringIO()
    Console(width=100, file=file).print(demo.picture({"async": lanes}, full_s=12.0))
    shown = [line.rstrip() for line in file.getvalue().splitlines()]
    assert shown[1:4] == ["asynchronous calls  6.0 s", "one", "two[INTR]"]
    assert shown[4].split() == ["model", "█" * 8 + "░" * 8 + "█" * 8]
    assert shown[5].split() == ["f()", "━" * 12, "…"]


@pytest.mark.slow
def test_the_model_that_ships_answers_alike_whether_its_calls_wait_or_not() -> None:
    assert demo.Demo().run() == 0


@pytest.fixture(scope="module")
def beginner() -> train.Start:
    return train.small_llama(seed=3)


def parts(tokens: Tokens, codec: Codec) -> list[tuple[bool, str]]:
    """The runs of tokens that the agent wrote or did not write, as text."""
    runs: list[tuple[bool, list[int]]] = []
    for id_, written in zip(*tokens, strict=True):
        if not runs or runs[-1][0] != written:
            runs.append((written, []))
        runs[-1][1].append(id_)
    return [(written, codec.tokenizer.decode(ids, skip_special_tokens=False)) for written, ids in runs]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_the_agent_writes_sound_calls_and_every_call_is_answered_once_outside_of_frames(
    mode: Mode, beginner: train.Start
) -> None:
    for number, dialogue in enumerate(islice(dialogues(5, "training"), 60)):
        rng = random.Random(number)
        tokens = weave(dialogue, mode, delays(rng, dialogue), rng, beginner.codec)
        (prompted, _), *rest = parts(tokens, beginner.codec)
        assert not prompted
        parser, calls, pending, answered = cml.CMLParser(), {}, set(), []
        for written, text in rest:
            if not written:
                assert parser.clean
                for segment in text.split(cml.DELIMITERS.interrupt)[1:]:
                    id_, value = segment.removesuffix(cml.DELIMITERS.end).split(cml.DELIMITERS.head)
                    pending.remove(id_.strip())
                    answered.append((id_.strip(), int(value)))
                continue
            for frame in parser.feed(text):
                assert not isinstance(frame, cml.BadFrame)
                if isinstance(frame, cml.CallFrame):
                    calls[frame.id] = parse_call(frame.code, dict.fromkeys(("price",), ("item",)) | _PARAMETERS)
                    pending.add(frame.id)
        assert not pending
        assert sorted(answered) == list(zip(IDS, dialogue.values, strict=False))
        assert [name for name, _ in calls.values()] == [question.tool for question in dialogue.questions]


_PARAMETERS = dict.fromkeys(("weight", "shelf", "height", "age"), ("item",)) | {
    "add": ("first", "second"),
    "total": ("p", "q", "r", "s"),
}


def test_a_row_keeps_its_dialogues_apart_and_learns_what_the_agent_wrote(beginner: train.Start) -> None:
    some = list(islice(woven(1, "training", beginner.codec), 12))
    packed = pack(some, 192)
    assert sorted(map(id, (dialogue for row in packed for dialogue in row))) == sorted(map(id, some))
    together = batch(packed, 192)
    row = next(i for i, row in enumerate(packed) if len(row) > 1)
    begin, second = len(packed[row][0].ids), packed[row][1]
    end = begin + len(second.ids)
    assert together.learnt[row, begin : end - 1].tolist() == second.written[1:]
    assert not together.learnt[row, end - 1]
    assert np.bincount(together.learnt.ravel())[1] == sum(sum(dialogue.written) for dialogue in some)
    alone = logits(beginner.model, beginner.params, batch([[second]], 192))[0, : len(second.ids)]
    np.testing.assert_allclose(logits(beginner.model, beginner.params, together)[row, begin:end], alone, atol=1e-4)


@pytest.mark.slow
def test_a_few_steps_lower_the_loss_and_the_model_is_loaded_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "model"
    assert train.Train(str(directory), steps=8, rows=2, width=192).run() == 0
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", capsys.readouterr().out)]
    assert losses[-1] < losses[0] - 1
    with pytest.raises(ModelError, match="holds a model already"):
        train.Train(str(directory)).run()
    served, learning_on = load(directory, dtype="float32"), train.checkpoint(str(directory))
    apart = separate(served.params)
    assert jax.tree.all(
        jax.tree.map(
            lambda served_weight, learnt_weight: (served_weight == learnt_weight).all(), apart, learning_on.params
        )
    )
    assert learning_on.codec.end in served.model.config.eos_token_ids
    assert learning_on.codec.part("[CALL] p [HEAD]") == train.small_llama(0).codec.part("[CALL] p [HEAD]")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_the_engine_runs_a_dialogue_that_is_forced_and_interrupts_it_as_in_training(
    mode: Mode, beginner: train.Start
) -> None:
    model, params, codec = beginner
    some = list(islice(dialogues(9, "test"), 4))
    with LLM(model, params=params, tokenizer=codec.tokenizer, max_num_seqs=4, max_num_batched_tokens=32) as llm:
        for dialogue in some:
            forced = [id_ for piece in script(dialogue, mode) for id_ in codec.part(piece.text)] + [codec.end]
            sampling = SamplingParams(max_tokens=len(forced), forced_output_ids=forced)
            waits_s = [0.02 * (1 + place % 3) for place in range(len(dialogue.questions))]
            output = evaluate.generate(llm, dialogue, mode, waits_s, sampling)
            ended = evaluate.outcome(llm, dialogue, output)
            assert (ended.well_formed, ended.right) == (True, True)
            for written_call in output.outputs[0].interrupts:
                tokens = tuple(output.outputs[0].token_ids[slice(*written_call.span)])
                assert tokens == codec.part(
                    interrupt(written_call.call.id, dialogue.values[IDS.index(written_call.call.id)])
                )
