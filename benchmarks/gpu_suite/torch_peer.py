"""What torch's scaled-dot-product attention reaches on the cases of `kernels`, as a peer: no pages, keys and values contiguous.

In a process without JAX, so that the two do not share memory. Rows: the case, `implementation` (torch), `seconds`,
`bytes_per_s`, `flops_per_s`; or `error`.
"""

import time
from collections.abc import Callable, Iterator
from itertools import cycle
from statistics import median
from typing import Any

from benchmarks.suite.sizes import MIB, AttentionCase, Row, Sizes

BEYOND_CACHE_BYTES = 512 * MIB
MOST_INPUTS = 128
TURNS = 5
ERROR_CHARACTERS = 300


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure all cases that fit. Fails as a whole where there is no torch."""
    import torch  # pyright: ignore[reportMissingImports]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for case in sizes.attention:
        if case.kv_bytes > sizes.attention_pool_bytes or case.window is not None:
            continue
        row = case.describe() | {"implementation": "torch"}
        try:
            seconds = _time(torch, device, sizes, case)
        except Exception as error:  # out of memory, or a shape that it refuses
            yield row | {"error": repr(error)[:ERROR_CHARACTERS]}
        else:
            yield row | {
                "seconds": seconds,
                "bytes_per_s": case.kv_bytes / seconds,
                "flops_per_s": case.flops / seconds,
            }


def _time(torch: Any, device: str, sizes: Sizes, case: AttentionCase) -> float:
    from torch.nn.attention.bias import causal_lower_right  # pyright: ignore[reportMissingImports]
    from torch.nn.functional import scaled_dot_product_attention  # pyright: ignore[reportMissingImports]

    heads, dtype = case.heads, getattr(torch, sizes.dtype)

    def draw(num_heads: int, tokens: int) -> Any:
        return torch.randn(case.rows, num_heads, tokens, heads.dim, device=device, dtype=dtype)

    q = draw(heads.query, case.chunk)
    count = max(1, min(MOST_INPUTS, BEYOND_CACHE_BYTES // case.kv_bytes))
    inputs = cycle([(draw(heads.kv, case.context), draw(heads.kv, case.context)) for _ in range(count)])
    mask = None if case.chunk == 1 else causal_lower_right(case.chunk, case.context)

    def run() -> None:
        key, value = next(inputs)
        scaled_dot_product_attention(q, key, value, attn_mask=mask, enable_gqa=heads.query != heads.kv)

    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    with torch.inference_mode():
        _turn(run, wait, 2)
        runs = max(1, min(1000, round(sizes.enough_s / _turn(run, wait, 1))))
        return median(_turn(run, wait, runs) for _ in range(TURNS))


def _turn(run: Callable[[], None], wait: Callable[[], None], count: int) -> float:
    wait()
    started_s = time.perf_counter()
    for _ in range(count):
        run()
    wait()
    return (time.perf_counter() - started_s) / count
