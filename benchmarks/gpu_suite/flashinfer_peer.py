"""What FlashInfer's paged attention reaches on cases of `kernels`, as a peer, in pages of the same size that lie as scattered.

In a process without JAX. A case is `Sizes.calls` calls in one CUDA graph, each over pages of its own. The first call of a kind
compiles its kernel with the machine's nvcc, which takes most of `plan_s`. Rows: the case, `implementation` (flashinfer),
`seconds`, `bytes_per_s`, `flops_per_s`; or `error`, or `skipped` with the reason, in place of all that.
"""

import time
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu_suite.torch_peer import TorchDevice
from benchmarks.suite.sizes import MIB, AttentionCase, Row, Sizes

WORKSPACE_BYTES = 256 * MIB
ERROR_CHARACTERS = 300


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure the first model's cases that fit. Those that decode come first, since their kernel is compiled sooner."""
    device, heads = TorchDevice(), sizes.attention[0].heads
    for case in sorted(sizes.attention, key=lambda case: case.chunk):
        if case.kv_bytes > sizes.attention_pool_bytes or case.heads != heads:
            continue
        row = case.describe() | {"implementation": "flashinfer"}
        if not device.is_gpu:
            yield row | {"skipped": "needs a GPU"}
            continue
        try:
            measured = _measured(device, sizes, case)
        except Exception as error:  # a kernel may not compile, and a shape may be refused
            yield row | {"error": repr(error)[:ERROR_CHARACTERS]}
        else:
            yield row | measured


def _measured(device: TorchDevice, sizes: Sizes, case: AttentionCase) -> Row:
    torch, heads, dtype = device.torch, case.heads, getattr(device.torch, sizes.dtype)
    each = -(-case.context // sizes.page_size)
    num_pages = case.rows * each
    count = max(1, min(sizes.calls, sizes.attention_pool_bytes // case.kv_bytes))
    pools = [torch.randn(num_pages, 2, sizes.page_size, heads.kv, heads.dim, dtype=dtype) for _ in range(count)]
    began_s = time.perf_counter()
    attend = _planned(device, sizes, case, each)
    q = torch.randn(case.rows * case.chunk, heads.query, heads.dim, dtype=dtype)
    attend(q, pools[0])
    torch.cuda.synchronize()
    plan_s = time.perf_counter() - began_s
    seconds = device.seconds(lambda: [attend(q, pages) for pages in pools], sizes.enough_s) / count
    row = {"seconds": seconds, "bytes_per_s": case.kv_bytes / seconds, "flops_per_s": case.flops / seconds}
    return row | {"plan_s": plan_s}


def _planned(device: TorchDevice, sizes: Sizes, case: AttentionCase, each: int) -> Any:
    """What attends queries `[T, H, D]` over a pool: rows of `each` scattered pages.

    Its buffers are its own, as a CUDA graph needs them.
    """
    from flashinfer import (  # pyright: ignore[reportMissingImports]
        BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper,
    )

    torch, heads = device.torch, case.heads
    starts = torch.arange(case.rows + 1, dtype=torch.int32)
    pages = torch.randperm(case.rows * each).to(torch.int32)
    last = torch.full((case.rows,), case.context - (each - 1) * sizes.page_size, dtype=torch.int32)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8)
    kinds = {"q_data_type": sizes.dtype, "kv_data_type": sizes.dtype}
    table = (starts * each, pages, last)
    shape = (heads.query, heads.kv, heads.dim, sizes.page_size)
    if case.chunk == 1:
        names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
        buffers = dict(zip(names, (array.clone() for array in table), strict=True))
        grouped = heads.query >= 4 * heads.kv  # as its documentation advises
        decode = BatchDecodeWithPagedKVCacheWrapper(workspace, use_cuda_graph=True, use_tensor_cores=grouped, **buffers)
        decode.plan(*table, *shape, **kinds)
        return decode.run
    prefill = BatchPrefillWithPagedKVCacheWrapper(
        workspace,
        use_cuda_graph=True,
        qo_indptr_buf=starts.clone(),
        paged_kv_indptr_buf=table[0].clone(),
        paged_kv_indices_buf=pages.clone(),
        paged_kv_last_page_len_buf=last.clone(),
    )
    prefill.plan(starts * case.chunk, *table, *shape, causal=True, **kinds)
    return prefill.run
