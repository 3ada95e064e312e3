"""Draws the next tokens from logits, on the device: logits processors, the draws, and their reports.

Masks, biases and penalties come first; they read the state by sequence slot, and the logits of a row without options pass
unchanged, bit by bit, whatever the options of other rows. A row's draw depends on its own key and position, never on the batch.
The filters `min_p`, `top_k` and `top_p` become one lower bound on a row's logits, so that equal logits stay together. The k-th
largest logit, and the logit at which the largest probabilities reach a sum, are found without sorting the row: on a CPU from
its few hundred largest logits where they suffice, otherwise by a search over the bits of the float. Reports are log
probabilities and ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, UInt32

from jinfercept.models.parallel import num_devices
from jinfercept.pallas.layouts.pages import Scalar
from jinfercept.sampling_params import MAX_LOGPROBS, SamplingParams
from jinfercept.sched.plan import NOT_FINITE, NOTHING_ALLOWED, TokenLogprobs

Kind = Literal["greedy", "drawn", "filtered"]
"""What a step's draw computes: the largest logits; draws by temperature too; the filters `top_k`, `top_p`, `min_p` too."""
KINDS: tuple[Kind, ...] = get_args(Kind)
Logits = Float[Array, "R V"]
"""A row of numbers over the vocabulary for each sampled row: logits, before or after their processors."""
NOTHING = -1
"""In a bad sequence, a place that every token matches; in a slot's recent tokens, a place that no token matches."""
IN_PROMPT = 1 << 30
"""Added to the count of a token that occurs in the slot's prompt or in a result of its calls."""


class SampleRows(NamedTuple):
    """Sampling parameters of `R` rows, see `SamplingParams`. Unused rows write to the scratch slot, which is the last one."""

    token_index: Int[Array, "R"]  # of the step's tokens, whose logits they are
    slot: Int[Array, "R"]
    key_high: Int[Array, "R"]  # of the 64 bits of the request's random key
    key_low: Int[Array, "R"]
    position: Int[Array, "R"]  # of the token to be drawn, in its sequence
    remembered: Int[Array, "R"]  # 1: the state of its slot applies
    ends_forbidden: Int[Array, "R"]  # 1: end tokens are forbidden
    top_k: Int[Array, "R"]  # 0: all
    temperature: Float[Array, "R"]
    top_p: Float[Array, "R"]
    min_p: Float[Array, "R"]
    repetition: Float[Array, "R"]
    presence: Float[Array, "R"]
    frequency: Float[Array, "R"]


class Slots(NamedTuple):
    """Sampling state of the sequences with options, by slot; that of the others is not valid.

    The number `V` marks an unused place in `biased` and at the end of a bad sequence.
    """

    recent: Int32[Array, "slots recent"]  # the tokens generated last, the newest at the end
    counts: Int32[Array, "slots V"]  # how often a token was generated, plus `IN_PROMPT`
    allowed: UInt32[Array, "slots words"]
    ends: UInt32[Array, "slots words"]
    biased: Int32[Array, "slots biased"]
    bias: Float32[Array, "slots biased"]
    bad: Int32[Array, "slots bad recent_and_one"]  # the last token may not follow the ones before it


def mask_words(vocab_size: int) -> int:
    """Words of a mask over the vocabulary: bit `v % 32` of word `v // 32` is for token `v`."""
    return -(-vocab_size // 32)


def unpack_mask(words: UInt32[Array, "R words"], vocab_size: int) -> Bool[Array, "R V"]:
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & 1
    return bits.reshape(len(words), -1)[:, :vocab_size] != 0


def shape_logits(logits: Logits, mask: UInt32[Array, "R words"], slots: Slots, rows: SampleRows) -> Logits:
    """Add biases and penalties to the logits, and put -inf in place of forbidden tokens. A row without a mask has all bits."""
    remembered = rows.remembered != 0
    biased = _penalize(_bias(logits, slots, rows, remembered), slots, rows, remembered)
    return jnp.where(_allowed(mask, slots, rows, remembered, logits.shape[-1]), biased, -jnp.inf)


def remember(slots: Slots, tokens: Int[Array, "R"], rows: SampleRows) -> Slots:
    """Add one more token to the slots of each remembered row."""
    places = distinct(jnp.where(rows.remembered != 0, rows.slot, len(slots.recent)), len(slots.recent))
    recent = jnp.concatenate([slots.recent[rows.slot, 1:], tokens[:, None]], axis=1)
    return slots._replace(
        recent=slots.recent.at[places].set(recent, mode="drop", unique_indices=True),
        counts=slots.counts.at[places, tokens].add(1, mode="drop", unique_indices=True),
    )


def distinct(places: Int[Array, "*R n"], end: int) -> Int[Array, "*R n"]:
    """Make places from `end` on distinct, as those below are already; nothing is written to places from `end` on."""
    # XLA writes to distinct places with plain stores; otherwise a GPU runs one compare-and-swap loop for every number.
    return jnp.where(places < end, places, end + jnp.arange(places.shape[-1], dtype=places.dtype))


def _bias(logits: Logits, slots: Slots, rows: SampleRows, remembered: Bool[Array, "R"]) -> Logits:
    vocab_size = logits.shape[-1]
    places = distinct(jnp.where(remembered[:, None], slots.biased[rows.slot], vocab_size), vocab_size)
    none, bias = jnp.zeros_like(logits), slots.bias[rows.slot]
    biases = none.at[jnp.arange(len(logits))[:, None], places].set(bias, mode="drop", unique_indices=True)
    biases = jax.lax.optimization_barrier(biases)  # or XLA copies every step's logits, to change them in place
    return logits + biases


def _penalize(logits: Logits, slots: Slots, rows: SampleRows, remembered: Bool[Array, "R"]) -> Logits:
    counts = jnp.where(remembered[:, None], slots.counts[rows.slot], 0)
    generated = counts & (IN_PROMPT - 1)
    repetition = jnp.where(counts != 0, rows.repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - rows.frequency[:, None] * generated.astype(jnp.float32)
    return logits - jnp.where(generated != 0, rows.presence[:, None], 0.0)


def _allowed(
    mask: UInt32[Array, "R words"], slots: Slots, rows: SampleRows, remembered: Bool[Array, "R"], vocab_size: int
) -> Bool[Array, "R V"]:
    everything = jnp.uint32(0xFFFFFFFF)
    both = mask & jnp.where(remembered[:, None], slots.allowed[rows.slot], everything)
    # The mask always holds. If no token is left, bad words and end tokens are allowed; if still none is left, all tokens of the
    # mask.
    words = jnp.where(jnp.any(both != 0, axis=1, keepdims=True), both, mask)
    hard = unpack_mask(words, vocab_size)
    ends = jnp.where((remembered & (rows.ends_forbidden != 0))[:, None], slots.ends[rows.slot], 0)
    soft = unpack_mask(words & ~ends, vocab_size) & ~_bad(slots, rows, remembered, vocab_size)
    return jnp.where(jnp.any(soft, axis=1, keepdims=True), soft, hard)


def _bad(slots: Slots, rows: SampleRows, remembered: Bool[Array, "R"], vocab_size: int) -> Bool[Array, "R V"]:
    sequences, recent = slots.bad[rows.slot], slots.recent[rows.slot]
    before = sequences[..., :-1]
    fits = jnp.all((before == NOTHING) | (before == recent[:, None, :]), axis=-1) & remembered[:, None]
    last = jnp.where(fits, sequences[..., -1], vocab_size)
    none = jnp.zeros((len(last), vocab_size), bool)
    return none.at[jnp.arange(len(last))[:, None], last].set(True, mode="drop")


COLDEST = 1e-5
"""Lower temperatures that are not 0 count as this one: logits divided by it stay finite."""
BLOCK = 64
"""Columns whose maximum stands for them: a row of 128k columns has 2,004 maxima, and 20 blocks have 1,280 columns."""
NUM_BEST = 512
"""Largest logits of a row that `_by_best` sorts."""
# Compiled for an H100, 64 rows of 128k logits take 79 kernels, in 16 passes without a loop; they read the logits or as large an
# array 34 times, and write one 9 times. Digits of two bits take 113 kernels and 32 passes. A bisection, one bit a pass, takes
# 64 passes in two loops.
BITS = 4
"""Of the 32 bits of a bound, as many are settled by one pass over the logits on a GPU, which has 15 sums per row."""
SMALLEST_KEY = np.uint32(0x007FFFFF)
"""Of minus infinity, see `_keys`; smaller ones belong to no number."""


def sample(logits: Logits, rows: SampleRows, kind: Kind) -> tuple[Int[Array, "R"], Float[Array, "R"] | None]:
    """Draw one token per row: the largest logit's where the temperature is 0, otherwise from `softmax(logits / temperature)`
    among the tokens that `bounds` keeps. It is `NOT_FINITE` or `NOTHING_ALLOWED` where the largest logit is no number.

    Args:
        logits: as the model has them, or as `shape_logits` makes them where a row of the step needs it.
        rows: of a step whose `draw_needs` is this kind or a simpler one.
        kind: what is computed. A row has the same token in every kind that serves it.

    Returns:
        The tokens; and for the kind "filtered" the smallest scaled logit that each row keeps, minus infinity if it keeps all.
    """
    if kind == "greedy":
        return _token(logits), None

    def noise(high: Scalar, low: Scalar, position: Scalar) -> Float[Array, "V"]:
        key = jax.random.wrap_key_data(jnp.stack([high, low]).astype(jnp.uint32), impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, position), logits.shape[-1:], jnp.float32)

    warm = rows.temperature > 0
    scaled = _scaled(logits, rows)
    masked_logits, bound = scaled, None
    if kind == "filtered":
        bound = jnp.where(is_filtered(rows), bounds(scaled, rows), -jnp.inf)
        masked_logits = jnp.where(scaled < bound[:, None], -jnp.inf, scaled)  # a NaN stays
    # Gumbel-max with the row's own key: a request's tokens are the same whatever runs beside it, and however often it is
    # interrupted.
    random = jax.vmap(noise)(rows.key_high, rows.key_low, rows.position)
    return _token(jnp.where(warm[:, None], masked_logits + random, logits)), bound


def processed(
    logits: Logits, bound: Float[Array, "R"], tokens: Int[Array, "R"], rows: SampleRows
) -> tuple[Float[Array, "R"], UInt32[Array, "R words"]]:
    """The log probability of each token in the distribution that it was drawn from, and the tokens with a probability above 0
    there, as bits (`mask_words`). Where the temperature is 0, the token itself has the probability 1.

    `logits` and `rows` are as `sample` had them; `bound` is the smallest scaled logit that a row keeps.
    """
    warm = rows.temperature > 0
    scaled = _scaled(logits, rows)
    masked_logits = jnp.where(scaled < bound[:, None], -jnp.inf, scaled)
    chosen = jnp.take_along_axis(masked_logits, tokens[:, None], axis=1)[:, 0]
    logprob = jnp.where(warm, chosen - jax.nn.logsumexp(masked_logits, axis=-1), 0.0)
    columns = jnp.arange(logits.shape[-1], dtype=tokens.dtype)
    mask = jnp.where(warm[:, None], masked_logits > -jnp.inf, columns[None] == tokens[:, None])
    bits = jnp.pad(mask, ((0, 0), (0, -mask.shape[1] % 32))).reshape(len(mask), -1, 32).astype(jnp.uint32)
    return logprob, jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32)[None, None], axis=-1, dtype=jnp.uint32)


def _scaled(logits: Logits, rows: SampleRows) -> Logits:
    return logits / jnp.where(rows.temperature > 0, jnp.maximum(rows.temperature, COLDEST), 1.0)[:, None]


def logprobs(
    logits: Logits, tokens: Int[Array, "R"], num_best: int
) -> tuple[Float[Array, "R"], Int[Array, "R"], Float[Array, "R best"], Int[Array, "R best"]]:
    """Log probabilities of the tokens, their ranks (1: none is likelier), and the `num_best` largest with their tokens. Log
    probabilities are NaN in a row with a logit that is NaN or plus infinity."""
    total = jax.nn.logsumexp(logits, axis=-1)
    total = jnp.where(total == jnp.inf, jnp.nan, total)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    rank = jnp.sum(logits >= chosen, axis=-1)
    best, ids = top_k(logits, min(num_best, logits.shape[-1]))
    return chosen[:, 0] - total, rank, best - total[:, None], ids


def _token(values: Logits) -> Int[Array, "R"]:
    columns, largest = jax.lax.platform_dependent(values, cpu=_largest_of_blocks, default=_largest)
    problem = jnp.where(largest == -jnp.inf, NOTHING_ALLOWED, NOT_FINITE)
    return jnp.where(jnp.isfinite(largest), columns, problem).astype(jnp.int32)


def _largest(values: Logits) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
    """The reduction of `argmax`, which also has the value; NaN is the largest."""

    def larger(a, b):
        (x, i), (y, j) = a, b
        first = (x > y) | (x != x)
        return jnp.where(first, x, y), jnp.where(first | ((x == y) & (i < j)), i, j)

    columns = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
    start = jnp.array(-jnp.inf, values.dtype), jnp.array(0, jnp.int32)
    largest, column = jax.lax.reduce((values, columns), start, larger, (1,))
    return column, largest


def _largest_of_blocks(values: Logits) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
    """XLA does not vectorise `_largest` on a CPU. This finds the first block with the largest maximum, then the place in it."""
    values = jax.lax.optimization_barrier(values)  # computed once
    num_rows, num_columns = values.shape
    padded = jnp.pad(values, ((0, 0), (0, -num_columns % BLOCK)), constant_values=-jnp.inf)
    blocks = padded.reshape(num_rows, -1, BLOCK)
    maxima = jnp.max(blocks, axis=-1)
    block = _first_largest(maxima)
    place = _first_largest(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0])
    return block * BLOCK + place, jnp.max(maxima, axis=-1)


def _first_largest(values: Logits) -> Int[Array, "R"]:
    columns = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
    is_largest = values == jnp.max(values, axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_largest, columns, values.shape[-1] - 1), axis=-1)


def is_filtered(rows: SampleRows) -> Bool[Array, "R"]:
    return (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)


def bounds(scaled: Logits, rows: SampleRows) -> Float[Array, "R"]:
    """The smallest logit that a row keeps. `scaled` are logits divided by the temperature.

    First `min_p` of the largest probability applies, then the `top_k` largest of the rest, then the fewest of these whose share
    of their common probability reaches `top_p`. Logits that equal the last one kept are kept too.
    """
    return jax.lax.platform_dependent(scaled, rows, cpu=_by_best, default=partial(_by_digits, bits=BITS, unroll=True))


def _by_best(scaled: Logits, rows: SampleRows) -> Float[Array, "R"]:
    pairs = jax.lax.top_k(scaled, min(NUM_BEST, scaled.shape[-1]))
    extra = (rows.top_k,) if num_devices() > 1 else ()  # XLA's partitioner fails at a barrier of these pairs alone
    best, *_ = jax.lax.optimization_barrier((*pairs, *extra))  # or XLA sees that indices are unused, and sorts all
    last = jnp.clip(rows.top_k, 1, best.shape[-1]) - 1
    kth = jnp.take_along_axis(best, last[:, None], axis=1)[:, 0]
    floor = jnp.maximum(_min_p(best[:, 0], rows), jnp.where(rows.top_k > 0, kth, -jnp.inf))
    goal = rows.top_p * jnp.sum(_weights(scaled, best[:, 0], floor), axis=-1)
    sums = jnp.cumsum(_weights(best, best[:, 0], floor), axis=-1)
    reached = jnp.argmax(sums >= goal[:, None], axis=-1)
    enough = jnp.where(rows.top_p < 1, sums[:, -1] >= goal, True) & (rows.top_k <= best.shape[-1])
    at = jnp.take_along_axis(best, reached[:, None], axis=1)[:, 0]
    bound = jnp.maximum(floor, jnp.where(rows.top_p < 1, at, -jnp.inf))
    otherwise = partial(_by_digits, scaled, rows, bits=1, unroll=False)
    return jax.lax.cond(jnp.all(enough), lambda: bound, lambda: jnp.where(enough, bound, otherwise()))


@partial(jax.jit, static_argnames=("bits", "unroll"))  # traced once: all executables that draw have it
def _by_digits(scaled: Logits, rows: SampleRows, bits: int, *, unroll: bool) -> Float[Array, "R"]:
    keys, top = _keys(scaled), jnp.max(scaled, axis=-1)
    top_k = jnp.clip(rows.top_k, 1, scaled.shape[-1]).astype(jnp.float32)
    least = jnp.full(len(scaled), -jnp.inf)
    kth = _largest_with_sum(keys, lambda keys: jnp.ones_like(keys, jnp.float32), top_k, least, bits, unroll=unroll)
    floor = jnp.maximum(_min_p(top, rows), jnp.where(rows.top_k > 0, kth, -jnp.inf))
    weights = _weights(scaled, top, floor)
    goal = rows.top_p * jnp.sum(weights, axis=-1)

    def weigh(keys: UInt32[Array, "R V"]) -> Logits:
        return jnp.exp(_floats(keys) - top[:, None]) if unroll else weights  # on a GPU it costs less than to read them

    reached = _largest_with_sum(keys, weigh, goal, floor, bits, unroll=unroll)
    return jnp.where(rows.top_p < 1, reached, floor)


def _min_p(top: Float[Array, "R"], rows: SampleRows) -> Float[Array, "R"]:
    return top + jnp.log(rows.min_p)


def _weights(scaled: Float[Array, "R n"], top: Float[Array, "R"], floor: Float[Array, "R"]) -> Float[Array, "R n"]:
    # probabilities, up to a factor of the row
    return jnp.where(scaled >= floor[:, None], jnp.exp(scaled - top[:, None]), 0.0)


def _keys(values: Float[Array, "*axes"]) -> UInt32[Array, "*axes"]:
    """Unsigned integers in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _floats(keys: UInt32[Array, "*R n"]) -> Float[Array, "*R n"]:
    keys = jnp.maximum(keys, SMALLEST_KEY)
    return jax.lax.bitcast_convert_type(jnp.where(keys >> 31, keys & jnp.uint32(0x7FFFFFFF), ~keys), jnp.float32)


def _largest_with_sum(
    keys: UInt32[Array, "R V"],
    weigh: Callable[[UInt32[Array, "R V"]], Logits],
    goal: Float[Array, "R"],
    least: Float[Array, "R"],
    bits: int,
    *,
    unroll: bool,
) -> Float[Array, "R"]:
    """The largest float, by row, with a sum of weights of at least `goal` from it upwards; `least` if that is larger. One pass
    over the keys settles `bits` bits, with a sum for every digit but 0."""
    start = _keys(least)

    def settle(index: Scalar | int, key: UInt32[Array, "R"]) -> UInt32[Array, "R"]:
        shift, own_keys = jnp.asarray(32 - bits * (index + 1), jnp.uint32), keys
        if (
            unroll
        ):  # or XLA keeps what two passes have in common, as large as the keys, and compiles each pass by itself
            own_keys, key, shift = jax.lax.optimization_barrier((keys, key, shift))
        pivots = [jnp.maximum(key | jnp.uint32(digit) << shift, start) for digit in range(1, 1 << bits)]
        reached = [(total >= goal).astype(jnp.uint32) for total in _sums(own_keys, weigh(own_keys), pivots)]
        return key | sum(reached[1:], reached[0]) << shift

    key = jnp.zeros(len(keys), jnp.uint32)
    if unroll:  # a GPU's host would wait for the end of a loop
        for index in range(32 // bits):
            key = settle(index, key)
    else:
        key = jax.lax.fori_loop(0, 32 // bits, settle, key)
    return _floats(jnp.maximum(key, start))


def _sums(
    keys: UInt32[Array, "R V"], weights: Logits, pivots: Sequence[UInt32[Array, "R"]]
) -> Sequence[Float[Array, "R"]]:
    terms = [jnp.where(keys >= pivot[:, None], weights, 0.0) for pivot in pivots]
    zeros = [jnp.float32(0)] * len(terms)
    # one pass over the keys for all pivots
    return jax.lax.reduce(terms, zeros, lambda a, b: [x + y for x, y in zip(a, b, strict=True)], (1,))


def top_k(values: Logits, k: int) -> tuple[Float[Array, "R k"], Int[Array, "R k"]]:
    """The `k` largest of each row and their columns: the largest first, of equals the lowest column first."""
    return jax.lax.platform_dependent(values, cpu=partial(_top_k, k=k), default=partial(top_k_of_blocks, k=k))


def top_k_of_blocks(values: Logits, k: int) -> tuple[Float[Array, "R k"], Int[Array, "R k"]]:
    """As `top_k`, from the `k` blocks with the largest maxima: `k` numbers in them come before those of any other block."""
    # XLA sorts the whole row for `lax.top_k` of more than 16, and its kernel for fewer does not promise an order of equals.
    num_rows, num_columns = values.shape
    if num_columns <= k * BLOCK:
        return _top_k(values, k)
    num_blocks = -(-num_columns // BLOCK)
    padded = jnp.pad(values, ((0, 0), (0, num_blocks * BLOCK - num_columns)), constant_values=-jnp.inf)
    blocks = padded.reshape(num_rows, num_blocks, BLOCK)
    _, chosen = jax.lax.top_k(jnp.max(blocks, axis=-1), k)
    chosen = jnp.sort(chosen, axis=-1)  # columns ascend, so that equals keep their order
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(num_rows, k * BLOCK)
    best, places = jax.lax.top_k(candidates, k)
    return best, jnp.take_along_axis(chosen, places // BLOCK, axis=1) * BLOCK + places % BLOCK


def _top_k(values: Logits, k: int) -> tuple[Float[Array, "R k"], Int[Array, "R k"]]:
    best, columns = jax.lax.top_k(values, k)
    return best, columns


def report(
    logits: Logits,
    shaped: Logits,
    bound: Float[Array, "R"],
    tokens: Int[Array, "R"],
    rows: SampleRows,
) -> tuple[Int32[Array, "R columns"], UInt32[Array, "R words"]]:
    """Join the reports of draws into one array, and give the tokens of each distribution (`processed`) in another.

    A row has the token's rank and the likeliest tokens. Then come floats by their bits: the log probabilities of the token, of
    the likeliest ones, and of the token in the distribution of the draw. `logits` are the model's; `shaped`, `bound` and `rows`
    are the draw's.
    """
    logprob, rank, best, ids = logprobs(logits, tokens, MAX_LOGPROBS)
    drawn, kept_mask = processed(shaped, bound, tokens, rows)
    floats = jnp.concatenate([logprob[:, None], best, drawn[:, None]], axis=1)
    return jnp.concatenate([rank[:, None], ids, jax.lax.bitcast_convert_type(floats, jnp.int32)], axis=1), kept_mask


def read_report(row: Int32[np.ndarray, "columns"], num_best: int) -> TokenLogprobs:
    """Read a row of `report`, by the model's own logits."""
    width = len(row) // 2
    ids, floats = row[1:width], row[width:-1].view(np.float32)
    best = zip(ids[:num_best].tolist(), floats[1 : 1 + num_best].tolist(), strict=True)
    return TokenLogprobs(float(floats[0]), int(row[0]), tuple(best))


def read_reports(
    reports: Int32[Array, "R columns"],
    kept_mask: UInt32[Array, "R words"] | None,
    reported: Sequence[SamplingParams | None],
    vocab_size: int,
) -> Iterator[TokenLogprobs | None]:
    """Read what the parameters of each row ask for; None for rows without."""
    keeps = kept_mask is not None and any(params and params.return_kept_tokens for params in reported)
    words = np.asarray(kept_mask) if keeps else None
    for place, (row, params) in enumerate(zip(np.asarray(reports), reported, strict=False)):
        if params is None:
            yield None
            continue
        entry = read_report(row, params.logprobs or 0)
        if params.reports_processed:
            ids = _kept(words[place], vocab_size) if words is not None and params.return_kept_tokens else None
            entry = entry._replace(processed=float(row[-1:].view(np.float32)[0]), kept=ids)
        yield entry


def _kept(words: UInt32[np.ndarray, "words"], vocab_size: int) -> Any:
    size = int(np.bitwise_count(words).sum())
    # as `outputs.KeptTokens` takes them: ids or bits, whichever are smaller
    return None if size == vocab_size else _bits(words) if size <= len(words) else partial(_bits, words.copy())


def _bits(words: UInt32[np.ndarray, "words"]) -> Int32[np.ndarray, "bits"]:
    return np.flatnonzero(np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")).astype(np.int32)
