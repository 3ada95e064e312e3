"""What writes and moves pages on an H100, compiled ahead of time: in place, plain stores of words, no atomics."""

from math import prod

import pytest

from jinfercept.runner.page_transfers import transfer_sizes
from tests.aot.cuda import compile_for

PAGE_SIZE, NUM_LAYERS = 16, 2
LAYER_BYTES = 2 * prod((6_000, PAGE_SIZE, 2, 8, 128))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("staging_pages", [1, pytest.param(16, marks=pytest.mark.slow)])
def test_aot_pages_are_written_by_plain_stores_of_words(dtype: str, staging_pages: int) -> None:
    case = {"page_size": PAGE_SIZE, "dtype": dtype, "staging_pages": staging_pages}
    compiled, most = compile_for("h100", pages={"pages": case}), transfer_sizes("gpu", staging_pages)[0]
    assert {"pages write 512", "pages scatter 1", f"pages gather {most}"} <= compiled.keys()
    for name, facts in compiled.items():
        assert facts["error"] is None, f"{name}: {facts['error']}"
        kind = name.split()[1]
        in_place = {"write": 1, "scatter": NUM_LAYERS}.get(kind, 0)
        width = 2 if dtype == "float32" else 1
        assert facts["alias_bytes"] == in_place * width * LAYER_BYTES, name
        assert facts["temp_bytes"] < 1024, name
        if kind == "select":  # moves an array within the device, when the host compacts it
            continue
        assert facts["accesses"], name
        for kernel, accesses in facts["accesses"].items():
            assert any(access.startswith("st.global") for access in accesses), (name, kernel)
            assert not [access for access in accesses if access.startswith(("atom", "red"))], (name, kernel, accesses)
            stores = [access for access in accesses if access.startswith("st") or kind != "write"]
            assert not [access for access in stores if access.endswith("16")], (name, kernel, accesses)
