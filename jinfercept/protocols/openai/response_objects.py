"""Schemas of the answers of `/v1/responses`, for the OpenAPI document. Output is a flat list of *items* with ids."""

from typing import Any, Literal

from pydantic import BaseModel


class InputTokensDetails(BaseModel):
    """Details of the input tokens."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    """Details of the output tokens."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(BaseModel):
    """The error of a failed response."""

    code: str
    message: str


class ConversationId(BaseModel):
    """The conversation that a response is a turn of."""

    id: str


class ResponseObject(BaseModel):
    """A response in its current state; with `stream` it comes in typed server-sent events."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseFailure | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: ConversationId | None = None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    jinfercept: dict[str, Any] | None = None


class ItemList(BaseModel):
    """A page of items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(BaseModel):
    """Confirms that a response is deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]
