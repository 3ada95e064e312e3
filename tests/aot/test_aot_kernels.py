"""The kernels compile ahead of time, Triton's for A100 and H100, Mosaic's for H100: shared memory within limits, no spilled
registers; pages are written in place by plain stores of words."""

import re
from itertools import product
from math import prod
from typing import Any

import pytest

from jinfercept.pallas.mosaic_attention import GROUPS
from jinfercept.pallas.tiles import DECODE_REGISTERS, power_of_two
from jinfercept.runner.page_transfers import transfer_sizes
from tests.aot.cuda import compile_for

MiB = 1 << 20


BUCKET = {"num_tokens": 512, "num_rows": 64, "pages_per_row": 128}


def case(heads: tuple[int, int], head_dim: int, page_size: int, dtype: str) -> tuple[str, dict[str, Any]]:
    num_heads, num_kv_heads = heads
    name = f"paged {num_heads}/{num_kv_heads} x {head_dim} page {page_size} {dtype}"
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return name, BUCKET | sizes | {"page_size": page_size, "dtype": dtype}


# Every head dim with two types, every page size with two groups, for one GPU or the other.
DECODES, SIZES = case((32, 8), 128, 16, "bfloat16")


def joined(case: tuple[str, dict[str, Any]], *, interleaved: bool) -> tuple[str, dict[str, Any]]:
    """The kernel for decodes that also rotates and writes."""
    name, sizes = case
    return f"{name}, decodes joined", sizes | {"decode_only": True, "joined": True, "interleaved": interleaved}


def stored_as(name: str, case: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """The kernels on quantised pages."""
    return f"{case[0]}, pages in {name}", case[1] | {"kv_cache_dtype": name}


def scored(case: tuple[str, dict[str, Any]], **scoring: Any) -> tuple[str, dict[str, Any]]:
    """The kernels of a layer whose scores have a window, a soft cap or sinks."""
    return f"{case[0]}, {scoring}", case[1] | scoring


SCORED = [
    scored(case((4, 1), 256, 16, "bfloat16"), window=512),  # Gemma 3 1B
    scored(case((8, 4), 256, 16, "bfloat16"), window=4096, soft_cap=50.0),  # Gemma 2 2B
    scored(case((16, 8), 256, 16, "bfloat16"), window=1024),  # Gemma 4 26B-A4B and 31B
    scored(case((64, 8), 64, 16, "bfloat16"), window=128, sinks=True),  # gpt-oss
    scored(case((32, 8), 128, 16, "bfloat16"), window=1024, soft_cap=30.0, sinks=True),
    scored(case((9, 3), 96, 128, "float32"), window=1024, soft_cap=30.0, sinks=True),
    scored(stored_as("int8", case((32, 8), 128, 16, "bfloat16")), window=1024, soft_cap=30.0, sinks=True),
]


SCORED_BESIDE_MOSAIC = [
    (f"{name}, mosaic", sizes | {"attention": "mosaic"})
    for name, sizes in SCORED
    if name.split()[3] in ("64", "128") and "int8" not in name
]


SAMPLE = {
    "h100": [
        joined(case((32, 8), 128, 16, "bfloat16"), interleaved=False),
        case((16, 16), 256, 64, "bfloat16"),
        stored_as("int8", case((9, 3), 64, 16, "float16")),
        joined(case((9, 3), 96, 128, "float32"), interleaved=False),
        (f"{DECODES}, decodes only", SIZES | {"decode_only": True}),
        case((32, 8), 128, 16, "bfloat16"),
        case((9, 3), 96, 128, "float32"),
        case((32, 32), 64, 32, "float16"),
        stored_as("fp8", case((32, 8), 128, 16, "bfloat16")),
        stored_as("int8", case((16, 16), 256, 16, "bfloat16")),
    ],
    "a100": [
        case((9, 3), 96, 128, "float32"),
        stored_as("int8", case((32, 8), 128, 16, "bfloat16")),
        joined(case((16, 16), 256, 16, "bfloat16"), interleaved=True),
        case((32, 8), 128, 64, "float16"),
        case((16, 16), 256, 16, "float32"),
        case((9, 3), 64, 32, "bfloat16"),
        case((64, 8), 96, 128, "bfloat16"),
        stored_as("fp8", case((9, 3), 64, 16, "float32")),
    ],
}


FEW = 2
"""Of the sample for an A100, the first: for an H100, the GPU bill and the pool of three gigabytes have kernels."""


MATRIX = [
    case(*choice)
    for choice in product(
        [(16, 16), (9, 3), (32, 8), (64, 8)], [64, 96, 128, 256], [16, 128], ["bfloat16", "float16", "float32"]
    )
]


def check(gpu: str, cases: list[tuple[str, dict[str, Any]]], generation: str = "cuda13") -> None:
    compiled = compile_for(gpu, generation, kernels=dict(cases))
    for (name, sizes), facts in zip(cases, compiled.values(), strict=True):
        assert facts["error"] is None, f"{name}: {facts['error']}"
        assert facts["kernels"] == (1 if "decodes" in name else 2)
        count_bytes = 4 * BUCKET["num_rows"] * sizes["num_kv_heads"]  # of the counts of rows' pieces
        zeros = [made for size, made in facts["made"] if "broadcast" in made and size > count_bytes]
        assert not zeros, name  # under the results
        assert facts["temp_bytes"] < 64 * MiB, name  # the pool has gigabytes


@pytest.mark.parametrize(
    ("gpu", "number"),
    [("a100", FEW), *(pytest.param(gpu, len(cases), marks=pytest.mark.slow) for gpu, cases in SAMPLE.items())],
)
def test_aot_a_sample_of_kernels_compiles_within_the_limits_of_the_gpu(gpu: str, number: int) -> None:
    check(gpu, SAMPLE[gpu][:number])


@pytest.mark.slow
@pytest.mark.parametrize("gpu", SAMPLE)
def test_aot_kernels_of_scored_layers_compile_within_the_limits_of_the_gpu(gpu: str) -> None:
    cases = [*SCORED, *(SCORED_BESIDE_MOSAIC if gpu == "h100" else [])]
    check(gpu, cases)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("gpu", SAMPLE)
def test_aot_quantised_pages_of_many_query_heads_for_a_kv_head_spill_no_registers(gpu: str) -> None:
    shapes = [((24, 1), 128), ((32, 1), 128), ((24, 1), 64), ((64, 1), 128)]
    cases = [stored_as(stored, case(heads, dim, 16, "bfloat16")) for heads, dim in shapes for stored in ("int8", "fp8")]
    check(gpu, cases)


@pytest.mark.slow
def test_aot_compiling_refuses_what_does_not_fit() -> None:
    name, sizes = case((32, 8), 128, 16, "bfloat16")
    decode = (16, 64, 4, 3)
    tiles = {
        f"{name} with too much shared memory": [decode, (128, 256, 8, 5), 432],
        f"{name} with too many registers": [decode, (128, 64, 4, 3), 432],
    }
    kernels = {name: sizes | {"tiles": tiles} for name, tiles in tiles.items()}
    compiled = compile_for("a100", kernels=kernels | {f"{name} for Hopper": sizes | {"attention": "mosaic"}})
    errors = [facts["error"] or "" for facts in compiled.values()]
    assert "hared memory" in errors[0]
    assert "register spilling" in errors[1]
    assert "the Mosaic kernel is for Hopper" in errors[2]


LONG = {"pages_per_row": 131_072 // 16}


HOPPER_SAMPLE = [(f"{DECODES}, contexts of 131,072", SIZES | LONG)]


HOPPER_MATRIX = [
    case(*choice)
    for choice in product([(16, 16), (9, 3), (32, 8), (64, 8)], [64, 128], [16, 48, 128], ["bfloat16", "float16"])
]


HOPPER_MATRIX += [case((8 * group, 8), dim, 16, "bfloat16") for group in {*GROUPS} - {4, 8} for dim in (64, 128)]


def check_mosaic(cases: list[tuple[str, dict[str, Any]]]) -> None:
    compiled = compile_for("h100", kernels={name: sizes | {"attention": "mosaic"} for name, sizes in cases})
    for name, facts in compiled.items():
        assert facts["error"] is None, f"{name}: {facts['error']}"
        assert (facts["mosaic_kernels"], facts["kernels"]) == (1, 1), name
        assert facts["temp_bytes"] < 64 * MiB, name  # of decode rows: chunks have none
        assert max((size for size, _ in facts["made"]), default=0) < MiB, (
            name
        )  # no queries or results on their way to the kernel
    assembled = compiled[cases[0][0]]["assembled"]  # all together
    assert len(assembled) == len(cases)
    for log in assembled:
        assert "for 'sm_90a'" in log
        assert not re.search(r"[1-9]\d* bytes (stack|spill)", log), log
        assert "Performance Loss" not in log, log  # wgmma one after the other
    for schedule in compiled[cases[0][0]]["scheduled"]:  # the softmax runs beside the second of two products
        assert re.search("m{8,}1e{64,}t0|e{64,}t0t*m{8,}1", schedule), schedule  # a loop, whose blocks PTX may turn


def test_aot_a_sample_of_the_mosaic_kernel_compiles_for_hopper() -> None:
    check_mosaic(HOPPER_SAMPLE)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_aot_every_mosaic_kernel_compiles_for_hopper() -> None:
    check_mosaic(HOPPER_MATRIX)


POOL_BYTES = 3e9  # of a layer: an offset in bytes fills 32 bits, but no 31


def in_a_large_pool(case: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """The kernels on a pool of `POOL_BYTES`."""
    name, sizes = case
    width = sizes["head_dim"] + 4 if "kv_cache_dtype" in sizes else 2 * sizes["head_dim"]
    return f"{name}, pool", sizes | {"num_pages": int(POOL_BYTES / (32 * sizes["num_kv_heads"] * width))}


def check_code(gpu: str, cases: list[tuple[str, dict[str, Any]]]) -> None:
    """Offsets do not wrap around, quantised numbers are copied by 16 bytes, and as many decode programs run as planned."""
    compiled = compile_for(gpu, kernels=dict(map(in_a_large_pool, cases)), read_ptx=True)
    for (name, facts), (_, sizes) in zip(compiled.items(), cases, strict=True):
        assert facts["error"] is None, f"{name}: {facts['error']}"
        quantised = "kv_cache_dtype" in sizes
        for kernel, code in facts["code"].items():
            assert code["address_scale"] * 2**31 >= POOL_BYTES, (name, kernel)
            if quantised:
                assert code["copied"].get("16", 0) >= 8, (name, kernel)  # the scales are copied by 4
            if "decode_attention" in kernel:
                registers = DECODE_REGISTERS[quantised][power_of_two(sizes["head_dim"])]
                assert code["registers"] <= registers, (name, kernel)


def test_aot_offsets_in_a_pool_of_three_gigabytes_do_not_wrap_around() -> None:
    check_code("h100", [stored_as("int8", case((32, 8), 128, 16, "bfloat16"))])


@pytest.mark.slow
@pytest.mark.parametrize("gpu", SAMPLE)
def test_aot_heads_of_512_dimensions_have_kernels(gpu: str) -> None:
    """Those of Gemma 4's layers without a window."""
    models = [case(heads, 512, 16, "bfloat16") for heads in ((16, 2), (8, 2), (8, 1))]
    cases = [*models, *(stored_as(stored, case) for case in models for stored in ("int8", "fp8"))]
    cases += [case((16, 2), 512, 16, "float16"), case((16, 2), 512, 16, "float32")]
    check(gpu, cases)
    check_code(gpu, [(f"{name}, decodes", sizes | {"decode_only": True}) for name, sizes in cases[:-1]])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("gpu", SAMPLE)
def test_aot_every_decode_kernel_has_the_registers_that_its_wave_counts_on(gpu: str) -> None:
    models = [case(heads, dim, 16, "bfloat16") for heads in ((32, 8), (16, 16)) for dim in (64, 96, 128, 256)]
    plain = [(f"{name}, decodes", sizes | {"decode_only": True}) for name, sizes in models]
    quantised = [stored_as(stored, case) for case in plain for stored in ("int8", "fp8")]
    check_code(gpu, [*plain, *quantised, *(joined(case, interleaved=False) for case in models)])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("gpu", SAMPLE)
def test_aot_every_kernel_compiles_within_the_limits_of_the_gpu(gpu: str) -> None:
    check(gpu, MATRIX)


@pytest.mark.slow
def test_aot_the_plugin_of_cuda_12_compiles_the_same() -> None:
    name, sizes = case((32, 8), 128, 16, "bfloat16")
    check("h100", [(name, sizes)], "cuda12")


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
