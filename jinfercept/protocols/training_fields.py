"""Fields of answers that a trainer reads: which tokens the model generated, with which weights and how likely."""

from typing import Any

from jinfercept.outputs import CompletionOutput
from jinfercept.protocols.errors import ApiError
from jinfercept.protocols.schemas import SamplingBody

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
