"""Which prompts an engine refuses."""

from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from jinfercept.engine.admission import check_request
from jinfercept.errors import RequestError
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams


def check(ids: Sequence[int], **fields: Any) -> None:
    check_request(Request("request", ids, SamplingParams(), **fields), 10, 100)


@pytest.mark.parametrize("ids", [(0, 9), [0, 9], array("i", [0, 9])])
def test_any_sequence_of_ids_is_a_prompt(ids: Sequence[int]) -> None:
    check(ids)
    check(ids, ids_below=10)


@pytest.mark.parametrize("ids", [(10,), [-1], array("i", [10]), array("i", [0, -1]), (1.0,)])
@pytest.mark.parametrize("fields", [{}, {"ids_below": 11}])
def test_ids_outside_the_vocabulary_are_refused_unless_they_are_known_to_be_in_it(ids: Any, fields: Any) -> None:
    with pytest.raises(RequestError, match="from 0 to 9"):
        check(ids, **fields)
