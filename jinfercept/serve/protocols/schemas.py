"""Schemas that the bodies of several routes share. Types are strict: a number is not a text.

Unknown fields are ignored, as in vLLM; known fields that are not supported are refused, and so are unknown names in the object
`jinfercept` and in the objects within it (`check_extras`). A list is refused at its first wrong item, and an
object by its size before its items are validated: a body has room for a million items.
"""

import re
from base64 import b64decode
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import unquote

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field
from pydantic_core import PydanticCustomError

from jinfercept.errors import nearest
from jinfercept.outputs import CompletionOutput
from jinfercept.serve.protocols.errors import ApiError

MAX_MESSAGES = 16384
MAX_TOOLS = 512
MAX_STOPS = 64
MAX_CHOICES = 128
MAX_SESSION_ID = 256
MAX_BIASES = 1024


class _FirstError(FailFast):
    """`FailFast`, hashable: members of a union have to be."""

    def __hash__(self) -> int:
        return hash(_FirstError)


FIRST_ERROR = _FirstError()
"""Annotation of a list: validation ends at its first wrong item."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(max_length=2**24)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
ShortText = Annotated[str, Field(max_length=256)]
"""Of types, one that may be unknown."""
Keyword = Annotated[str, Field(max_length=64)]
ModelName = Annotated[str, Field(max_length=1024)]
SessionId = Annotated[str, Field(min_length=1, max_length=MAX_SESSION_ID)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
NumBest = Annotated[int, Field(ge=0, le=20)]
"""Number of most likely tokens that are reported for each."""
PriorityNumber = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Temperature = Annotated[float, Field(ge=0, le=1e6)]
Fraction = Annotated[float, Field(ge=0, le=1)]
TopK = Annotated[int, Field(ge=-1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
_T = TypeVar("_T")
Parts = Annotated[list[_T], Field(max_length=4096), FIRST_ERROR]
Messages = Annotated[list[_T], Field(min_length=1, max_length=MAX_MESSAGES), FIRST_ERROR]
Tools = Annotated[list[_T], Field(max_length=MAX_TOOLS), FIRST_ERROR]
Texts = Annotated[list[Text], Field(min_length=1, max_length=4096), FIRST_ERROR]
StopText = Annotated[str, Field(max_length=4096)]
Stops = Annotated[list[StopText], Field(max_length=MAX_STOPS), FIRST_ERROR]


_TEXT_FILE = re.compile(r"data:(text/|application/(json|xml|yaml|toml)\b).*", re.DOTALL)
"""The beginning of a data URL of a text."""


class Body(BaseModel):
    """Base of all parts of a body."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, populate_by_name=True)


def type_of(part: Any) -> Any:
    """The type of a part of a body, an object or a model; None if it has none."""
    return part.get("type") if isinstance(part, dict) else getattr(part, "type", None)


def read_file(part: Any) -> Any:
    """A part of a body; a file, of chats or of responses, whose data are text as a part of text.

    Raises:
        PydanticCustomError: its data are none.
    """
    kind = part.get("type") if isinstance(part, dict) else None
    file = part.get("file") if kind == "file" else part
    if kind not in ("file", "input_file") or not isinstance(file, dict):
        return part
    name, given, text = file.get("filename"), file.get("file_data"), file.get("text", file.get("content"))
    head, is_url, data = f"{given}".partition(",")
    try:
        if text is None and (not given or (is_url and not _TEXT_FILE.fullmatch(head))):
            raise ValueError(head)
        if text is None:
            is_plain = is_url and not head.endswith(";base64")
            text = unquote(data) if is_plain else b64decode(data if is_url else head, validate=True).decode()
    except ValueError as error:
        message = "{kind} parts are not supported unless file_data is text, in base64 or as a data URL"
        raise PydanticCustomError("unsupported_file", message, {"kind": kind}) from error
    shown = "\n\n".join(["", *(f"{each}" for each in (name, text) if each), ""])  # apart from the other parts
    return {"type": "input_text", "text": shown}


def read_part(part: Any) -> Any:
    """A part of a message, as `read_file` reads it.

    Raises:
        PydanticCustomError: it is an image, a sound, a video, or a file whose data are no text.
    """
    kind = type_of(part)
    if kind in ("image_url", "input_image", "input_audio", "audio_url", "video_url"):
        raise PydanticCustomError("unsupported_part", "{kind} parts are not supported: send text", {"kind": kind})
    return read_file(part)


class OutputPart(Body):
    """A part of a tool's output; the model reads its text."""

    type: ShortText
    text: Text | None = None

    def shown(self) -> str:
        """The text; of a part that has none, what stands in its place."""
        return f"[{self.type}: it has no text]" if self.text is None else self.text


def _few_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise PydanticCustomError("too_many", "Dictionary should have at most {most} items", {"most": MAX_BIASES})
    return value


class AsyncCallOptions(Body):
    """How calls of the server's tools run while the model goes on.

    Attributes:
        calls: when a call runs: "async", the default: at once, while the model goes on; "parallel": with the others, and the
            model waits for them; "sync": the model waits for each.
        on_end: what the end of the text does while calls are pending: it waits for them, the default, or cancels them.
        reasoning: marks of reasoning, in which no call is found; "none": the model writes none. Of text completions.
    """

    calls: Literal["sync", "parallel", "async"] | None = None
    on_end: Literal["wait", "cancel"] | None = None
    max_pending: Positive | None = None
    reasoning: Keyword | None = None


class SessionHints(Body):
    """The body's object `jinfercept`: hints about the session, and the server's tools.

    Attributes:
        expected_s: seconds until the follow-up request.
        priority: smaller ones are served first.
        release: no follow-up request comes, so the context is not retained.
        server_tools: tools of the server that the model is offered: all, or those named.
    """

    session_id: SessionId | None = None
    expected_s: Annotated[float, Field(ge=0)] | None = None
    priority: PriorityNumber | None = None
    release: bool | None = None
    server_tools: bool | Annotated[list[ShortText], Field(max_length=512), FIRST_ERROR] | None = None
    max_rounds: Natural | None = None
    async_calls: AsyncCallOptions | None = None

    @property
    def wants_server_tools(self) -> bool:
        return self.server_tools not in (None, False)


class Extensions(Body):
    """Extensions of OpenAI's protocol in all bodies that generate."""

    jinfercept: SessionHints | None = None
    session_id: SessionId | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: PriorityNumber | None = None


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Body):
    """The schema of a `response_format`."""

    name: ShortText | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """`response_format`. Some clients have the schema beside the type, also of a `json_object`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`; one field is given."""

    json_: Text | dict[str, Any] | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: Texts | None = None
    grammar: Text | None = None


class SamplingBody(Extensions):
    """Sampling parameters and stop conditions: OpenAI's fields and vLLM's."""

    model: ModelName | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: TopK | None = None
    min_p: Fraction | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: StopText | Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024), FIRST_ERROR] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Natural | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_BIASES),
            BeforeValidator(_few_biases),
        ]
        | None
    ) = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=2**18), FIRST_ERROR] | None = None
    bad_words: Annotated[list[Text], Field(max_length=1024), FIRST_ERROR] | None = None
    prompt_logprobs: NumBest | None = None
    return_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    return_loss_mask: bool | None = None
    return_processed_logprobs: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    user: Annotated[str, Field(max_length=4096)] | None = None
    metadata: dict[str, Any] | None = None


TRAINING_FIELDS = ("return_loss_mask", "return_processed_logprobs")


def check_training_fields(body: SamplingBody) -> None:
    """Raise 400 for a body that asks for such fields in a stream."""
    for name in TRAINING_FIELDS if body.stream else ():
        if getattr(body, name):
            raise ApiError.bad(f"{name} cannot be streamed; fix: stream false", name)


def training_fields(body: SamplingBody, completion: CompletionOutput) -> dict[str, Any]:
    """The fields of a choice, by token of its `token_ids`: those of tools' results are among them."""
    fields: dict[str, Any] = {}
    if body.return_loss_mask or body.return_processed_logprobs:
        fields |= {"token_ids": completion.token_ids, "loss_mask": completion.loss_mask}
        fields["weight_versions"] = completion.weight_versions
    if body.return_processed_logprobs:
        fields["processed_logprobs"] = completion.processed_logprobs
    return fields


_UNSUPPORTED = frozenset(
    {"audio", "best_of", "chat_template", "continue_final_message", "documents", "ebnf", "function_call", "functions"}
    | {"grammar", "guided_choice", "guided_grammar", "guided_json", "guided_json_object", "guided_regex", "json_schema"}
    | {"kv_transfer_params", "length_penalty", "logits_processors", "mm_processor_kwargs", "modalities"}
    | {"output_format", "prompt_embeds", "regex", "response_format", "return_tokens_as_token_ids", "structural_tag"}
    | {"structured_outputs", "suffix", "truncate_prompt_tokens", "use_beam_search", "web_search_options"}
)
"""Fields that are refused, unless they are empty, false or null.

Some are fields of other routes: where the schema of a body has one, it is not among the body's unknown fields.
"""
_HARMLESS = {"best_of": 1, "length_penalty": 1, "modalities": ["text"], "response_format": {"type": "text"}}
"""Their values without an effect, which are accepted too."""

_MOST_UNKNOWN = 256


def check_extras(body: Extensions) -> None:
    """Raise 400 for an unsupported field that the schema of a body does not have, and for an unknown one in `jinfercept`.

    Other unknown fields are ignored.
    """
    if body.jinfercept is not None:
        _check_names(body.jinfercept, "jinfercept")
        if body.jinfercept.async_calls is not None:
            _check_names(body.jinfercept.async_calls, "jinfercept.async_calls")
    if len(body.model_extra or ()) > _MOST_UNKNOWN:
        raise ApiError.bad(f"the body has more than {_MOST_UNKNOWN} unknown fields; fix: leave them out")
    for name, value in (body.model_extra or {}).items():
        if name in _UNSUPPORTED and value and value != _HARMLESS.get(name):
            # older versions of vLLM had these; its newer ones have the other name, too
            fix = f"structured_outputs.{name[7:]}" if name.startswith("guided_") else "leave it out"
            raise ApiError.bad(f"{name} is not supported; fix: {fix}", name, "unsupported_parameter")


def _check_names(part: Body, field: str) -> None:
    for name in part.model_extra or ():
        names = list(type(part).model_fields)
        message = f"{field} has no {name[:80]!r}{nearest(name[:80], names)}; it has {', '.join(names)}"
        raise ApiError.bad(message, f"{field}.{name[:80]}", "unknown_parameter")
