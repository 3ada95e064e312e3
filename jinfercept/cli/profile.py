"""`jinfercept profile`: measure a model on this machine; a summary, and a JSON file that engines read, with all times."""

from dataclasses import dataclass
from typing import Annotated

from jinfercept.cli.options import Maybe, ModelName, Switch, engine_flags
from jinfercept.config import EngineOptions
from jinfercept.sched.profile import Profile
from jinfercept.sim.reports import check_writable
from jinfercept.start.progress import StartDisplay


@dataclass(frozen=True, kw_only=True)
class MeasureProfile:
    model: ModelName
    out: Maybe[str] = None
    """write the profile to this JSON file; engines on this machine find it without"""
    quick: Switch = False
    """only what an engine measures that starts without one"""
    engine: Annotated[EngineOptions, engine_flags("profile")]

    def run(self) -> int:
        """Measure, and print a summary; returns 0."""
        from jinfercept.llm import LLM

        if self.out:
            check_writable(self.out, "--out")
        options: EngineOptions = {**self.engine, "profile": "quick" if self.quick else "measure"}
        with StartDisplay(notes=True) as progress, LLM(self.model, progress=progress, **options) as llm:
            progress.close()
            measured = llm.profile
        print(_summary(measured))
        if self.out:
            measured.save(self.out)
            flag = f"--profile {self.out}"
            print(f"written to {self.out}: jinfercept serve MODEL {flag}, jinfercept simulate {flag}")
        return 0


def _summary(profile: Profile) -> str:
    decoding = [step for step in profile.tables["steps"] if step["depth"] is None]
    worst = {
        price: max(abs(step[price] / step["seconds"] - 1) for step in decoding) for price in ("profile_s", "line_s")
    }
    stairs = zip(profile.bucket_tokens, profile.bucket_s, strict=True)
    return "\n".join(
        (
            f"S: {profile.saturation} query tokens; the model's KV: {profile.kv_bytes_per_token:,} bytes per token",
            f"profile: {', '.join(f'{tokens}: {1e3 * seconds:.1f} ms' for tokens, seconds in stairs)}, and "
            f"{1e6 * profile.per_context_s:.2f} µs per context token, {1e9 * profile.per_pair_s:.0f} ns per query token of a "
            f"chunk and token before it; off by {worst['profile_s']:.0%} at most where rows decode",
            f"line: max({1e3 * profile.flat_s:.1f}, {1e3 * profile.fixed_s:.1f} + {1e3 * profile.per_query_s:.3f} · query "
            f"tokens) ms and the same for contexts; off by {worst['line_s']:.0%} at most",
            f"link: {profile.link_out_tokens_per_s:,.0f} tokens/s out, {profile.link_in_tokens_per_s:,.0f} in, "
            f"{profile.link_both_tokens_per_s:,.0f} both ways together, and {1e6 * profile.copy_s:.0f} µs a transfer",
            f"dispatch: {1e3 * profile.dispatch_s:.2f} ms a step; measured in {profile.tables['took_s']:.1f} s",
        )
    )
