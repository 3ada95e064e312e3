"""Errors and values can be pickled and copied, so that a worker's reach the process that waits for them."""

import builtins
import copy
import inspect
import pickle
import re
import threading
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import jinfercept
from jinfercept import events
from jinfercept.calls import Call, Result, Tool
from jinfercept.errors import EngineError, PluginError, RequestError
from jinfercept.outputs import (
    CompletionOutput,
    ContextUse,
    Interception,
    Interrupt,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from jinfercept.sampling_params import SamplingParams
from tests.support.sample_tokenizers import byte_level

PACKAGE = Path(jinfercept.__file__).parent
WAYS: tuple[Callable[[Any], Any], ...] = (
    copy.copy,
    copy.deepcopy,
    *(lambda value, protocol=protocol: pickle.loads(pickle.dumps(value, protocol)) for protocol in (2, 5)),
)


@cache
def exceptions() -> dict[str, type[BaseException]]:
    """Every exception class that a file of the package defines, by name."""
    builtin = {
        name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)
    }
    sources = {file: file.read_text(encoding="utf-8") for file in sorted(PACKAGE.rglob("*.py"))}
    classes = [
        (file, *parts) for file, text in sources.items() for parts in re.findall(r"^class (\w+)\((.+)\):", text, re.M)
    ]
    places, before = dict[str, Path](), -1
    while len(places) > before:  # until no class has a base that was found in the round before
        before = len(places)
        for file, name, bases in classes:
            if {*re.findall(r"\w+", bases)} & (builtin | places.keys() | {"HTTPException"}):
                places[name] = file
    modules = {name: ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for name, file in places.items()}
    return {name: getattr(import_module(module), name) for name, module in modules.items()}


def made(kind: type[BaseException]) -> BaseException:
    """An exception with a value for every argument that it needs."""
    if not inspect.isfunction(kind.__init__):  # of Python's own
        return kind("the message")
    taken = list(inspect.signature(kind).parameters.values())
    needed = [argument for argument in taken if argument.default is argument.empty]
    values = {argument: 418 if argument.annotation is int else f"the {argument.name}" for argument in needed}
    by_name = {argument.name: values.pop(argument) for argument in needed if argument.kind is argument.KEYWORD_ONLY}
    return kind(*values.values(), **by_name)


def seen(error: BaseException) -> tuple[Any, ...]:
    return type(error), str(error), error.args, vars(error)


def test_every_exception_of_the_package_can_be_pickled_and_copied() -> None:
    assert {"RequestError", "EngineError", "PluginError", "ApiError", "CallFailed", "Broken"} <= exceptions().keys()
    for kind in exceptions().values():
        error = made(kind)
        error.add_note("while it was tested")
        for way in WAYS:
            assert seen(way(error)) == seen(error)


class Unwilling:
    def __reduce__(self) -> str:
        raise KeyError("never")

    def __str__(self) -> str:
        return "unwilling"


@pytest.mark.parametrize("got", [lambda: 3, threading.Lock(), Unwilling(), (i for i in range(3)), [threading.Lock()]])
def test_a_value_that_cannot_be_pickled_travels_as_its_text(got: object) -> None:
    error = RequestError("that is wrong", got=got, fix="mend it")
    for way in WAYS:
        again = way(error)
        assert (str(again), again.what, again.fix) == (str(error), "that is wrong", "mend it")
        assert again.got == ([str(got[0])] if isinstance(got, list) else str(got))


def test_an_error_of_the_engine_keeps_the_outputs_that_it_carries() -> None:
    again = pickle.loads(pickle.dumps(EngineError("the device is gone", [OUTPUT, None], fix="restart")))
    assert again.outputs == [OUTPUT, None]
    assert "1 of 2 requests are lost" in str(again)


def test_the_end_of_a_request_travels_with_a_failure_that_cannot_be_pickled() -> None:
    failure = OSError("gone", threading.Lock())
    again = pickle.loads(pickle.dumps(events.Finished("a", OUTPUT, "", failure)))
    assert (again.output, type(again.failure)) == (OUTPUT, RuntimeError)
    assert str(again.failure).startswith("OSError: ")
    kept = pickle.loads(pickle.dumps(events.Finished("a", OUTPUT, "", PluginError("policy Mine", "raised"))))
    assert kept.failure.plugin == "policy Mine"


def test_a_tokenizer_is_the_same_after_pickling() -> None:
    again = pickle.loads(pickle.dumps(byte_level()))
    assert again.encode("abc <turn>") == byte_level().encode("abc <turn>")
    assert again.eos_token_ids == byte_level().eos_token_ids


def price(item: str) -> str:
    return "7"


CALL, RESULT = Call("price", "lamp " * 500, (3, 5)), Result("7 " * 500, token_ids=tuple(range(500)))
USE = ContextUse(3, 2, 1)
OUTPUT = RequestOutput(
    "request-7",
    "Q: " + "How much? " * 300,
    list(range(900)),
    [
        CompletionOutput(
            0,
            "Seven dollars. " * 200,
            list(range(700)),
            "stop",
            "\n",
            600,
            (Interception((CALL,), (RESULT,), (5, 9), 0.5, USE),) * 40,
            [None, *[{token: Logprob(-0.5, 1, "a") for token in range(20)}] * 699],
            ({"role": "assistant", "content": "Seven dollars. " * 200},),
            interrupts=(Interrupt(CALL, RESULT, (1, 2)),) * 9,
        )
    ],
    16,
    RequestMetrics(0.0, 0.1, 0.2, 0.0, 0, 0, 0, 0),
)

VALUES: dict[str, object] = {
    "AsyncCalls": jinfercept.AsyncCalls(calls="parallel"),
    "Delimiters": jinfercept.Delimiters("<c>", "<h>", "<e>", "<t>", "<i>"),
    "Finished": events.Finished("a", OUTPUT, "the rest"),
    "Intercepted": events.Intercepted("a", (CALL,)),
    "Called": events.Called("a", CALL),
    "Interrupted": events.Interrupted("a", (Interrupt(CALL, RESULT, (1, 2)),), (1, 2), "x"),
    "Resumed": events.Resumed("a", (RESULT,), (1, 2), "x"),
    "Token": events.Token("a", 3, "x", {3: Logprob(-0.5, 1, "x")}),
    "Arguments": events.Arguments(0, "{}", "a"),
    "CallEnded": events.CallEnded(0, CALL, "a"),
    "CallStarted": events.CallStarted(0, "price", "id", "a"),
    "Content": events.Content("x", "a"),
    "Reasoning": events.Reasoning("x", "a"),
    "Call": CALL,
    "RequestOutput": OUTPUT,
    "RolloutCall": jinfercept.RolloutCall("price", "lamp", "7", "ok", 0.5, (1, 2)),
    "SamplingParams": SamplingParams(temperature=0, stop="x", logit_bias={3: 1.5}, bad_words_token_ids=[[1, 2]]),
    "Tool": Tool(price, start="<<", stop="=", timeout_s=3),
    "StructuredOutputsParams": jinfercept.StructuredOutputsParams(json={"type": "object"}),
}
DETECTORS = {
    "ScriptedDetector": jinfercept.ScriptedDetector({3: [CALL]}),
    "StopStringDetector": jinfercept.StopStringDetector([Tool(price, start="<<", stop="=")]),
    "RegexDetector": jinfercept.RegexDetector("<<(?P<name>[a-z]+)>>"),
    "TokenDetector": jinfercept.TokenDetector({3: "price"}),
}


def test_every_public_value_can_be_pickled_and_copied() -> None:
    parts = {"LLM", "LoadedTools", "FormatDetector", "ChatOptions"}  # of a process, made of a parser, and a dict
    parts |= {"Rollout", "Rollouts"}  # of arrays
    public = {name: getattr(jinfercept, name) for name in {*jinfercept.__all__} - parts}
    values = {
        name for name, value in public.items() if isinstance(value, type) and not issubclass(value, BaseException)
    }
    assert values == VALUES.keys() | DETECTORS.keys()
    for value in VALUES.values():
        for way in WAYS:
            assert way(value) == value
    for name, detector in DETECTORS.items():
        for way in WAYS:
            assert type(way(detector).watch()) is type(detector.watch()), name


def test_a_large_output_is_shown_in_a_line() -> None:
    shown = repr(OUTPUT)
    assert len(shown) < 700
    assert all(part in shown for part in ("request-7", "Seven dollars.", "'stop'", "<700>", "<900>", "<40>", "'\\n'"))
    for value in (OUTPUT.interceptions[0], VALUES["Finished"], VALUES["Interrupted"], VALUES["Resumed"], RESULT):
        assert len(repr(value)) < 900
    assert "name='price'" in repr(OUTPUT.interceptions[0])
    assert "kept=3" in repr(OUTPUT.interceptions[0])
    assert repr(Call("price", "lamp", (3, 5))) == "Call(name='price', arguments='lamp', span=(3, 5))"
