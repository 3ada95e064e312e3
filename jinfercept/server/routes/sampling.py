"""Converts the sampling fields of a body to `SamplingParams`."""

from dataclasses import fields, replace
from typing import Any

from jinfercept.errors import RequestError
from jinfercept.protocols.errors import ApiError
from jinfercept.protocols.schemas import ResponseFormat, SamplingBody
from jinfercept.sampling_params import SamplingParams
from jinfercept.server.service import Service
from jinfercept.structured_outputs import StructuredOutputsParams

_SAME_NAMES = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "include_stop_str_in_output"),
    *("ignore_eos", "min_tokens", "skip_special_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words", "prompt_logprobs"),
)
"""Fields with the same name in the body and in `SamplingParams`."""
_NAMES = frozenset(field.name for field in fields(SamplingParams))


def sampling_params(
    body: SamplingBody, max_tokens: int | None, logprobs: int | None, service: Service, tenant: str
) -> SamplingParams:
    """The sampling parameters of a body. Structured outputs are compiled, so that mistakes in them are found here.

    Args:
        max_tokens: maximum tokens to generate; None: the default of the checkpoint, or up to the length of a sequence.
        logprobs: number of most likely tokens to report for each; None: no report.
        service: has the vocabulary and the grammar compiler.
        tenant: of the request.

    Raises:
        ApiError: 400, with the field.
    """
    said = {name: value for name in _SAME_NAMES if (value := getattr(body, name)) is not None}
    given: dict[str, Any] = {"max_tokens": None, **service.llm.sampling_defaults, **said}
    if max_tokens is not None:
        given["max_tokens"] = max_tokens
    stop = given.pop("stop", None) or ()
    given["stop"] = [stop] if isinstance(stop, str) else [text for text in stop if text]
    for name in ("stop", "bad_words"):
        service.check_chars(given.get(name), name)
    structured, llm = _structured(body), service.llm
    try:
        params = SamplingParams(logprobs=logprobs, **given)
    except RequestError as error:
        raise ApiError.of(error, _field_of(error)) from error
    _check_tokens(params, llm.model.config.vocab_size)
    if structured is None:
        return params
    field, options = structured
    try:
        outputs = StructuredOutputsParams(**options)
        if llm.grammars is not None:
            llm.grammars.of(tenant).compile(outputs)
    except RequestError as error:
        raise ApiError.of(error, field) from error
    return replace(params, structured_outputs=outputs)


def _check_tokens(params: SamplingParams, vocab_size: int) -> None:
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        wrong = [token for token in getattr(params, name) or () if not 0 <= token < vocab_size]
        if wrong:
            raise ApiError.bad(f"{name} names tokens from 0 to {vocab_size - 1}, not {wrong[0]}", name)


def _structured(body: SamplingBody) -> tuple[str, dict[str, Any]] | None:
    """The field that defines the form of the answer, with the keywords of `StructuredOutputsParams`; None without one."""
    given: list[tuple[str, dict[str, Any]]] = []
    form = body.response_format
    if form is not None and (wanted := _of_format(form)) is not None:
        given.append(("response_format", wanted))
    if body.structured_outputs is not None:
        outputs = body.structured_outputs.model_dump(exclude_none=True, by_alias=True)
        given.append(("structured_outputs", _supported(outputs)))
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{kind}")
        if value is not None:
            given.append((f"guided_{kind}", {kind: value}))
    if len(given) > 1:
        names = ", ".join(name for name, _ in given)
        raise ApiError.bad(f"one of these says what the answer has to be: {names}", given[1][0])
    return given[0] if given else None


def _of_format(form: ResponseFormat) -> dict[str, Any] | None:
    """The keywords for a `response_format`; None for a text. A schema is enforced wherever it stands."""
    inner = form.json_schema.schema_ if form.json_schema else None
    if None not in (inner, form.schema_) and inner != form.schema_:
        raise ApiError.bad("response_format has two schemas: leave one out", "response_format.schema")
    schema = form.schema_ if inner is None else inner
    if form.type == "text":
        if schema is not None:
            raise ApiError.bad("response_format is a text, which has no schema: use json_schema", "response_format")
        return None
    if form.type == "json_object":
        return {"json_object": True} if schema is None else {"json": {"type": "object"} | schema}
    if schema is None:
        raise ApiError.bad("response_format needs a schema", "response_format.json_schema.schema")
    return {"json": schema}


def _supported(outputs: dict[str, Any]) -> dict[str, Any]:
    kinds = ("json", "json_object", "regex", "choice", "grammar")
    if "structural_tag" in outputs:
        raise ApiError.bad("structural tags cannot be done here", "structured_outputs.structural_tag")
    return {kind: outputs[kind] for kind in kinds if kind in outputs}


def _field_of(error: RequestError) -> str | None:
    """The field with which the message of an error of `SamplingParams` begins; None if there is none."""
    if error.what.startswith("greedy outputs"):
        return "n"
    first = error.what.split(maxsplit=1)[0]
    return first if first in _NAMES else None
