"""Checks the fields of a body that the schemas do not have: unsupported ones are refused, unknown ones are ignored."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from jinfercept.errors import nearest
from jinfercept.protocols.errors import ApiError
from jinfercept.protocols.schemas import Body, Extensions

log = logging.getLogger(__name__)

_NEVER = (
    *("audio", "chat_template", "function_call", "guided_choice", "guided_grammar", "guided_json", "guided_regex"),
    *("output_format", "prompt_embeds", "structural_tag", "structured_outputs", "truncate_prompt_tokens"),
    "web_search_options",
)
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(_NEVER, ()),
    "best_of": (1,),
    "continue_final_message": (False,),
    "documents": ([],),
    "ebnf": ("",),
    "functions": ([],),
    "grammar": ("",),
    "guided_json_object": (False,),
    "json_schema": ({},),
    "kv_transfer_params": ({},),
    "length_penalty": (1.0, 1),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "regex": ("",),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
}
"""Fields that are not supported, with the values that have no effect and are accepted.

Some are fields of other routes: where the schema of a body has one, it is not among the body's unknown fields.
"""

_MOST_UNKNOWN = 256
_MOST_LOGGED = 1000


def check_extras(body: Extensions, logged: set[str]) -> None:
    """Checks the fields that the schema of a body does not have.

    Args:
        logged: names of unknown fields that were logged before; added to.

    Raises:
        ApiError: 400, for an unsupported field, and for an unknown one in the object `jinfercept`.
    """
    if body.jinfercept is not None:
        _check_names(body.jinfercept, "jinfercept")
        if body.jinfercept.async_calls is not None:
            _check_names(body.jinfercept.async_calls, "jinfercept.async_calls")
    if len(body.model_extra or ()) > _MOST_UNKNOWN:
        raise ApiError.bad(f"the body has more than {_MOST_UNKNOWN} unknown fields; fix: leave them out")
    for name, value in (body.model_extra or {}).items():
        if name in _HARMLESS:
            if value is not None and value not in _HARMLESS[name]:
                raise ApiError.bad(f"{name} is not supported; fix: leave it out", name, "unsupported_parameter")
        elif _is_new(name, logged):
            log.debug("the field %.80r is not known; it is ignored", name)


def log_left_out(what: str, types: Iterable[str], logged: set[str]) -> None:
    """Log once each that parts of a body are left out, since their types are not supported.

    Args:
        what: the parts, in the plural.
        logged: as of `check_extras`.
    """
    for kind in types:
        if _is_new(f"{what} {kind}", logged):
            log.warning("%s of type %.80r are not supported here; requests are answered without them", what, kind)


def _is_new(name: str, logged: set[str]) -> bool:
    """Whether a name was not logged before; it counts as logged from now on."""
    if name in logged or len(logged) >= _MOST_LOGGED:
        return False
    logged.add(name)
    return True


def _check_names(part: Body, field: str) -> None:
    """Raise 400 for a name that an object of ours does not have."""
    for name in part.model_extra or ():
        names = list(type(part).model_fields)
        message = f"{field} has no {name[:80]!r}{nearest(name[:80], names)}; it has {', '.join(names)}"
        raise ApiError.bad(message, f"{field}.{name[:80]}", "unknown_parameter")
