"""What the bodies of `/v1/chat/completions` and `/v1/completions` have in common. Types are strict: a number is not a text.

Fields that are not known are taken and ignored, as vLLM does; those that are known and cannot be done are refused. The object
`jinfercept` is ours alone: `refusals.check_extras` refuses names in it that are not known. A list is refused at its first wrong
item and an object before its items are looked at: a body has room for a million.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field
from pydantic_core import PydanticCustomError

MAX_STOPS = 64
MAX_CHOICES = 128
MAX_SESSION_ID = 256
MAX_BIASES = 1024


class _FirstError(FailFast):
    """`FailFast`, hashable: members of a union have to be."""

    def __hash__(self) -> int:
        return hash(_FirstError)


FIRST_ERROR = _FirstError()
"""Of a list: it is refused at its first wrong item."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(max_length=2**24)]


class Body(BaseModel):
    """Part of a request."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, populate_by_name=True)


def _few_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise PydanticCustomError("too_many", "Dictionary should have at most {most} items", {"most": MAX_BIASES})
    return value


class SessionHints(Body):
    """The body's `jinfercept` object: what helps to decide what becomes of the context afterwards, and the server's tools.

    Attributes:
        server_tools: offer the model those that the server runs: all of them, or these.
        max_rounds: turns whose calls the server runs.
    """

    session_id: Annotated[str, Field(min_length=1, max_length=MAX_SESSION_ID)] | None = None
    expected_s: Annotated[float, Field(ge=0)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    release: bool | None = None
    server_tools: (
        bool | Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=512), FIRST_ERROR] | None
    ) = None
    max_rounds: Annotated[int, Field(ge=0)] | None = None

    @property
    def wants_server_tools(self) -> bool:
        """Whether the model is offered tools of the server."""
        return self.server_tools not in (None, False)


class Extensions(Body):
    """Fields that OpenAI does not have and every endpoint that generates takes."""

    jinfercept: SessionHints | None = None
    session_id: Annotated[str, Field(min_length=1, max_length=MAX_SESSION_ID)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None


class StreamOptions(Body):
    """What a stream tells besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Body):
    """The schema of a `response_format`."""

    name: Annotated[str, Field(max_length=256)] | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What the answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: one of them."""

    json_: Text | dict[str, Any] | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1, max_length=4096), FIRST_ERROR] | None = None
    grammar: Text | None = None


class SamplingBody(Extensions):
    """How tokens are drawn and when a text ends. vLLM's fields among OpenAI's."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS), FIRST_ERROR] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024), FIRST_ERROR] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
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
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Text | dict[str, Any] | None = None
    guided_regex: Text | None = None
    guided_choice: Annotated[list[Text], Field(min_length=1, max_length=4096), FIRST_ERROR] | None = None
    guided_grammar: Text | None = None
    user: Annotated[str, Field(max_length=4096)] | None = None
    metadata: dict[str, Any] | None = None


class PromptTokensDetails(BaseModel):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens that a request took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
