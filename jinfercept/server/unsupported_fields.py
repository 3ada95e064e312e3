"""Fields that clients know from elsewhere: some cannot be done here and say so, the rest is taken and ignored."""

import logging
from collections.abc import Mapping
from typing import Any

from jinfercept.errors import nearest
from jinfercept.server.errors import ApiError
from jinfercept.server.protocol import Extensions, SessionHints

log = logging.getLogger(__name__)

_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": (),
    "functions": ([],),
    "kv_transfer_params": ({},),
    "length_penalty": (1.0, 1),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "return_tokens_as_token_ids": (False,),
    "structural_tag": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields that cannot be done, with the values at which they ask for nothing."""

_MOST_UNKNOWN = 256


def check_extras(body: Extensions, told: set[str]) -> None:
    """Look at the fields that are not ours.

    Args:
        told: names that were logged before; added to.

    Raises:
        ApiError: 400, for one that cannot be done, or that is unknown in the object `jinfercept`.
    """
    for name in (body.jinfercept and body.jinfercept.model_extra) or ():
        known = list(SessionHints.model_fields)
        message = f"jinfercept has no {name[:80]!r}{nearest(name[:80], known)}; it has {', '.join(known)}"
        raise ApiError.bad(message, f"jinfercept.{name[:80]}", "unknown_parameter")
    if len(body.model_extra or ()) > _MOST_UNKNOWN:
        raise ApiError.bad(f"the body has more than {_MOST_UNKNOWN} fields that are not known; fix: leave them out")
    for name, value in (body.model_extra or {}).items():
        if name in _HARMLESS:
            if value is not None and value not in _HARMLESS[name]:
                raise ApiError.bad(f"{name} cannot be done here", name, "unsupported_parameter")
        elif name not in told and len(told) < 1000:
            told.add(name)
            log.debug("the field %.80r is not known; it is ignored", name)
