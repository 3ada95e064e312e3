"""The shapes of a batch without a batch, for compiling ahead of time."""


def batch_shapes(num_tokens: int, num_rows: int, pages_per_row: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a bucket's `Batch`, by field; all are int32."""
    return {
        "tokens": (num_tokens,),
        "positions": (num_tokens,),
        "write_index": (num_tokens,),
        "query_starts": (num_rows + 1,),
        "context_lens": (num_rows,),
        "page_tables": (num_rows, pages_per_row),
        "num_decode": (),
    }
