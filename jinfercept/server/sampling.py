"""A body's sampling fields as `SamplingParams`."""

from dataclasses import fields, replace
from typing import Any

from jinfercept.errors import RequestError
from jinfercept.request import SamplingParams
from jinfercept.server.errors import ApiError
from jinfercept.server.protocol import SamplingBody
from jinfercept.server.service import Service
from jinfercept.structured_outputs import StructuredOutputsParams

_ALIKE = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "include_stop_str_in_output"),
    *("ignore_eos", "min_tokens", "skip_special_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words", "prompt_logprobs"),
)
"""Fields of the body that are called the same."""
_NAMES = frozenset(field.name for field in fields(SamplingParams))


def sampling_params(
    body: SamplingBody, max_tokens: int | None, logprobs: int | None, service: Service, owner: str
) -> SamplingParams:
    """What a body asks for.

    Args:
        max_tokens: to generate; None: as many as there is room for.
        logprobs: likeliest tokens to report beside each; None for no report.
        service: its model knows its tokens, and compiles what the answer has to be, so that a mistake in it is found now.
        owner: whose key it is.

    Raises:
        ApiError: 400, with the field.
    """
    given: dict[str, Any] = {name: value for name in _ALIKE if (value := getattr(body, name)) is not None}
    stop = given.pop("stop", None) or ()
    given["stop"] = [stop] if isinstance(stop, str) else [text for text in stop if text]
    for name in ("stop", "bad_words"):
        service.check_chars(given.get(name), name)
    structured, llm = _structured(body), service.llm
    try:
        params = SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)
    except RequestError as error:
        raise ApiError.of(error, _field_of(error)) from error
    _check_tokens(params, llm.model.config.vocab_size)
    if structured is None:
        return params
    field, asked = structured
    try:
        told = StructuredOutputsParams(**asked)
        if llm.grammars is not None:
            llm.grammars.of(owner).compile(told)
    except RequestError as error:
        raise ApiError.of(error, field) from error
    return replace(params, structured_outputs=told)


def _check_tokens(params: SamplingParams, vocab_size: int) -> None:
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        wrong = [token for token in getattr(params, name) or () if not 0 <= token < vocab_size]
        if wrong:
            raise ApiError.bad(f"{name} names tokens from 0 to {vocab_size - 1}, not {wrong[0]}", name)


def _structured(body: SamplingBody) -> tuple[str, dict[str, Any]] | None:
    """What the answer has to be, and which field says so."""
    said: list[tuple[str, dict[str, Any]]] = []
    form = body.response_format
    if form is not None and form.type == "json_object":
        said.append(("response_format", {"json_object": True}))
    if form is not None and form.type == "json_schema":
        schema = form.json_schema.schema_ if form.json_schema else None
        if schema is None:
            raise ApiError.bad("response_format needs a schema", "response_format.json_schema.schema")
        said.append(("response_format", {"json": schema}))
    if body.structured_outputs is not None:
        told = body.structured_outputs.model_dump(exclude_none=True, by_alias=True)
        said.append(("structured_outputs", _known(told)))
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{kind}")
        if value is not None:
            said.append((f"guided_{kind}", {kind: value}))
    if len(said) > 1:
        names = ", ".join(name for name, _ in said)
        raise ApiError.bad(f"one of these says what the answer has to be: {names}", said[1][0])
    return said[0] if said else None


def _known(told: dict[str, Any]) -> dict[str, Any]:
    kinds = ("json", "json_object", "regex", "choice", "grammar")
    if "structural_tag" in told:
        raise ApiError.bad("structural tags cannot be done here", "structured_outputs.structural_tag")
    return {kind: told[kind] for kind in kinds if kind in told}


def _field_of(error: RequestError) -> str | None:
    """The field that an error of `SamplingParams` begins with."""
    if error.what.startswith("greedy outputs"):
        return "n"
    first = error.what.split(maxsplit=1)[0]
    return first if first in _NAMES else None
