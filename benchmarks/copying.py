"""`python -m benchmarks copying`: decode tokens per second with and without drafts, where requests copy from their prompts.

Every prompt is a table of random records, as a tool returns it, and the beginning of the same table again, which the model goes
on with; of a model without a tokenizer, random tokens. Greedy; both ways run in one engine's executables, in turn.
"""

import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from rich.console import Console

from benchmarks.peers.peer_script import decode_rate
from benchmarks.throughput import token_times
from jinfercept.cli.options import HOSTS, ModelName, Several, engine_flags
from jinfercept.config import EngineOptions, SpeculativeConfig
from jinfercept.errors import ConfigError
from jinfercept.sim.reports import check_least, numbers, plain_table, show
from jinfercept.start.progress import StartDisplay

if TYPE_CHECKING:
    from jinfercept.llm import LLM

ROUNDS = 3
"""Times that a batch is measured each way; the fastest counts, since disturbances only add time."""
_LINES, _BEGUN_LINES = 24, 3
_NAMES = ("alder", "birch", "cedar", "elm", "fir", "hazel", "larch", "maple", "oak", "pine", "rowan", "willow")


@dataclass(frozen=True, kw_only=True)
class Copying:
    """The command."""

    model: ModelName
    batch: Several = ()
    """requests at once (default: 1,8)"""
    new_tokens: int = 128
    """tokens that each generates"""
    engine: Annotated[EngineOptions, engine_flags("max_num_seqs", *HOSTS)]

    def run(self) -> int:
        """Measure, and print a table; returns 0. Raises `ConfigError` for options that make no sense."""
        batches = numbers("--batch", self.batch or ("1,8",), int)
        check_least("--batch", batches[0], 1)
        check_least("--new-tokens", self.new_tokens, 2)
        given = self.engine.get("speculative_config") or '{"num_speculative_tokens": 7}'
        drafts = SpeculativeConfig.parse(given)._asdict()
        console = Console(stderr=True)
        from jinfercept.llm import LLM

        options: EngineOptions = {**self.engine, "max_num_seqs": max(batches), "speculative_config": drafts}
        with StartDisplay() as start, LLM(self.model, lazy=False, progress=start, **options) as llm:
            start.close()
            with console.status("copying"):
                cells = [_cell(llm, batch, self.new_tokens, drafts) for batch in batches]
        columns = ("batch", "without drafts", "with", "×", "tokens per step", "accepted by place", "same tokens")
        shown = plain_table(columns, caption="decoded tokens/s")
        for cell in cells:
            plain, drafted = cell.plain_tokens_per_s, cell.drafted_tokens_per_s
            shown.add_row(
                str(cell.batch),
                f"{plain:.1f}",
                f"{drafted:.1f}",
                f"{drafted / plain:.2f}",
                f"{cell.tokens_per_step:.2f}",
                ", ".join(f"{share:.0%}" for share in cell.accepted_shares) or "no drafts",
                f"{cell.same_tokens} of {cell.batch}",
            )
        show(shown)
        return 0


class CopyingCell(NamedTuple):
    """One number of requests.

    Attributes:
        batch: requests that run together.
        plain_tokens_per_s: decoded by all of them together, without drafts.
        drafted_tokens_per_s: the same with drafts.
        tokens_per_step: mean tokens that a step with drafts gave its request.
        accepted_shares: by the place of a draft in a step, the share of the steps with drafts in which it became a token.
        same_tokens: requests whose tokens were the same both ways.
    """

    batch: int
    plain_tokens_per_s: float
    drafted_tokens_per_s: float
    tokens_per_step: float
    accepted_shares: tuple[float, ...]
    same_tokens: int


def _cell(llm: "LLM", batch: int, new_tokens: int, drafts: dict[str, Any]) -> CopyingCell:
    """Measure a batch on an idle engine, which is started over. Raises `ConfigError` if its requests never decode together."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    streams: dict[bool, list[list[int]]] = {}
    accepted, steps = Counter[int](), 0
    for round_ in range(ROUNDS):
        prompts = [{"prompt_token_ids": _prompt(llm, 1000 * round_ + place)} for place in range(batch)]
        for drafting in (False, True):
            llm.restart(speculative_config=drafts if drafting else None)
            token_times(llm, prompts, 1)  # the pages of the prompts are kept, so that all requests decode together
            times, streams[drafting] = token_times(llm, prompts, new_tokens)
            rates[drafting].append(decode_rate(times))
        counters = llm.counters
        accepted, steps = accepted + counters.accepted, steps + counters.drafts
    if min(map(max, rates.values())) <= 0.0:
        raise ConfigError(
            "the requests of a batch do not decode at the same time",
            got=f"{batch} requests of {new_tokens} new tokens",
            fix="more new tokens, a larger KV pool, or prefix caching",
        )
    same = sum(plain == other for plain, other in zip(streams[False], streams[True], strict=True))
    return CopyingCell(
        batch,
        max(rates[False]),
        max(rates[True]),
        1 + accepted.total() / max(1, steps),
        tuple(accepted[place] / steps for place in sorted(accepted)),
        same,
    )


def _prompt(llm: "LLM", seed: int) -> list[int]:
    rng = random.Random(seed)
    if llm.tokenizer is None:
        return [rng.randrange(llm.engine.setup.model.config.vocab_size) for _ in range(16 * _LINES)]
    rows = [
        f"{rng.choice(_NAMES)} {rng.choice(_NAMES)}, {rng.randrange(10000)}, {rng.random():.3f}" for _ in range(_LINES)
    ]
    return llm.tokenizer.encode(
        "\n".join(["name, count, share", *rows, "", "name, count, share", *rows[:_BEGUN_LINES], ""])
    )
