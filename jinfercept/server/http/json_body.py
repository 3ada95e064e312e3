"""Reads JSON bodies as pydantic models."""

from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from jinfercept.protocols.encoding import encode
from jinfercept.protocols.errors import ApiError, invalid_body

_SHAPES = bytes.maketrans(b"123456789E", b"000000000e")
"""Makes all digits 0, and E an e."""
_EXPONENTS = (b"0e000", b"0e+000")
_MOST_DIGITS = 200


def parsed(body: bytes, model: TypeAdapter[Any] | None) -> Any:
    """A JSON body as a model. Raises `ApiError`: 400 for what is no JSON, or does not fit the model."""
    data = _json(body)
    try:
        return data if model is None else model.validate_python(data)
    except ValidationError as error:
        raise invalid_body(error.errors(include_url=False)) from None


def _json(body: bytes) -> Any:
    try:
        data = from_json(body, allow_inf_nan=False)
        if _has_large_number(body):
            encode(data)
    except ValueError as error:
        surrogate = " (half of a surrogate pair is no text)" if "hex escape" in str(error) else ""
        raise ApiError.bad(f"the body is not JSON: {error}{surrogate}", code="invalid_json") from None
    return data


def _has_large_number(body: bytes) -> bool:
    """Whether a JSON text has perhaps a number that is read as infinite, which JSON does not have."""
    shapes = body.translate(_SHAPES)
    return b"0" * _MOST_DIGITS in shapes or any(exponent in shapes for exponent in _EXPONENTS)
