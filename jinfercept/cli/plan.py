"""`jinfercept plan`: how many replicas of which kind serve a load within its limits, by simulated fleets. Imports no JAX.

Ends with a table of the kinds, the cheapest first, and, where asked for, JSON, a picture, and the file of `jinfercept deploy`.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Annotated, Any, get_args

from rich.console import Console
from tyro import conf

from jinfercept.cli.options import Maybe, ModelName, Several, Switch
from jinfercept.cli.simulated_loads import POLICY_NAMES, check_policies, drawer
from jinfercept.config import KVDTypeChoice
from jinfercept.errors import ConfigError
from jinfercept.meter.turns import LIMITS, LatencyLimits
from jinfercept.planner.plan_report import LEGEND, plan_panels, plan_table, sizing_values, write_yaml
from jinfercept.planner.sessions import SYSTEM_TOKENS
from jinfercept.planner.sizing import (
    MODELS,
    Detail,
    FleetLoad,
    ReplicaKind,
    Sizing,
    accelerator_kind,
    deployment,
    play_fleet,
    profile_kind,
    ranked,
    size_fleet,
)
from jinfercept.planner.traffic import read_traffic, without_system_prompt
from jinfercept.sched.data_sheets import ACCELERATORS
from jinfercept.sim.distributions import Like
from jinfercept.sim.plots import check_drawing, draw
from jinfercept.sim.reports import check_outputs, write_files, write_json
from jinfercept.sim.tables import check_least, listed, numbers, show
from jinfercept.sim.workload import Script, from_trace


@dataclass(frozen=True, kw_only=True)
class PlanFleet:
    """The command."""

    model: ModelName
    accelerator: Annotated[
        Several, conf.arg(help=f"of a replica, as H100 or 4xH100: {', '.join(ACCELERATORS)}; for {', '.join(MODELS)}")
    ] = ()
    profile: Several = ()
    """of a replica: a named profile, or a file of `jinfercept profile`"""
    price: Several = ()
    """of one accelerator for an hour, as H100=2.5; of a replica with a profile, by the profile's name (default: 1)"""
    traffic: Maybe[str] = None
    """recorded sessions: a trace, OpenTelemetry spans or the server's JSON log, a JSON line each; instead of --workload"""
    workload: str = "mixed"
    """mixed, math, qa, ve, chat, image or tts; or your own as path.py:Class"""
    like: Like = "trace"
    """statistics of the workload"""
    rate: Maybe[float] = None
    """sessions per second (default: as recorded)"""
    shared_tokens: int = SYSTEM_TOKENS
    """tokens of a system prompt before every session; with --traffic part of the recorded prompts"""
    first_token_limit: float = LIMITS.first_token_s
    """most seconds to the first token of a request"""
    per_token_limit: float = LIMITS.per_token_s
    """most seconds per token after it"""
    share: float = 0.95
    """of the requests that must stay within the limits"""
    policy: Annotated[Several, conf.arg(help=f"{POLICY_NAMES} (default: copy_ahead)")] = ()
    kv_cache_dtype: Several = ()
    """format of the KV pages of every accelerator: auto (bfloat16), int8 or fp8 (default: auto)"""
    kv_tokens: Maybe[int] = None
    """device pool of a replica (default: what the weights leave)"""
    host_tokens: Maybe[int] = None
    """host pool of a replica (default: four times the device pool)"""
    max_num_seqs: int = 256
    """sequences that run at once on a replica"""
    max_model_len: int = 16_384
    """tokens of the longest request"""
    most_replicas: int = 64
    """replicas that are tried"""
    duration: float = 300.0
    """seconds in which sessions begin; what is sent in the first third is not counted"""
    seed: Several = ()
    """of the sessions; several runs are counted together (default: 0)"""
    check_seed: Several = ()
    """play the best plan, and one replica fewer, with these seeds"""
    coarse: Switch = False
    """take the coarse model's word: quicker, for fleets of hundreds"""
    json: Maybe[str] = None
    """write all kinds and reports to this file"""
    plot: Maybe[str] = None
    """draw the kinds into this file"""
    yaml: Maybe[str] = None
    """write the best plan to this file, for `jinfercept deploy`"""

    def run(self) -> int:
        """Plan, and print a table.

        Returns:
            The exit status: 0; 1 if no kind meets the limits, or if another seed disagrees.

        Raises:
            ConfigError: the options make no sense.
        """
        self._check()
        seeds, kinds, load = numbers("--check-seed", self.check_seed, int), self._kinds(), self._load()
        detail: Detail = "coarse" if self.coarse else "stepped"
        console = Console(stderr=True)
        with console.status("…") as status:
            sizings = ranked([size_fleet(kind, load, self.most_replicas, detail, status.update) for kind in kinds])
        show(plan_table(sizings, load).shown())
        print(LEGEND, file=sys.stderr)
        best = sizings[0]
        agree = not (best.replicas and seeds) or self._agrees(best, load._replace(seeds=tuple(seeds)), detail)
        write_files(
            {
                self.json: lambda path: write_json(path, [sizing_values(sizing) for sizing in sizings]),
                self.plot: lambda path: draw(path, plan_panels(sizings, load)),
                self.yaml if sizings[0].replicas else None: lambda path: write_yaml(
                    path, deployment(sizings[0], self.model)
                ),
            }
        )
        if not best.replicas:
            print(f"no kind meets the limits with {self.most_replicas} replicas or fewer", file=sys.stderr)
        return 0 if best.replicas and agree else 1

    @property
    def _seeds(self) -> tuple[int, ...]:
        return tuple(numbers("--seed", self.seed or ("0",), int))

    def _check(self) -> None:
        for flag, value, least in (
            ("--shared-tokens", self.shared_tokens, 0),
            ("--max-num-seqs", self.max_num_seqs, 1),
            ("--max-model-len", self.max_model_len, 2),
            ("--most-replicas", self.most_replicas, 1),
            ("--first-token-limit", self.first_token_limit, 0.001),
            ("--per-token-limit", self.per_token_limit, 0.0001),
        ):
            check_least(flag, value, least)
        if not 0.0 < self.share <= 1.0:
            raise ConfigError("--share must be above 0 and at most 1", got=self.share, fix="above 0, at most 1")
        check_policies(listed(self.policy))
        if not self.accelerator and not self.profile:
            fix = "--accelerator H100, or --profile FILE of `jinfercept profile`"
            raise ConfigError("no accelerator and no profile was given to plan with", got="neither", fix=fix)
        check_outputs((("--json", self.json), ("--plot", self.plot), ("--yaml", self.yaml)))
        if self.plot is not None:
            check_drawing(self.plot)

    def _kinds(self) -> list[ReplicaKind]:
        """Every machine with every policy."""
        prices, kinds = self._prices(), list[ReplicaKind]()
        policies, dtypes = listed(self.policy or ("copy_ahead",)), self._kv_dtypes()
        pools = self.kv_tokens, self.host_tokens

        def add(kind: ReplicaKind, *more: str) -> None:
            kinds.append(kind._replace(label=", ".join((kind.label, *more))))

        for policy in policies:
            options: dict[str, Any] = {
                "policy": policy,
                "max_num_seqs": self.max_num_seqs,
                "max_model_len": self.max_model_len,
                "estimator": "history",
            }
            named = [policy] if len(policies) > 1 else []
            for name in listed(self.profile):
                add(profile_kind(name, *pools, prices.get(name, 1.0), **options), *named)
            for name, dtype in product(listed(self.accelerator), dtypes):
                price = prices.get(name.rpartition("x")[2], 1.0)
                kind = accelerator_kind(self.model, name, *pools, price, dtype, **options)
                add(kind, *([dtype] if len(dtypes) > 1 else []), *named)
        return kinds

    def _kv_dtypes(self) -> list[KVDTypeChoice]:
        names = listed(self.kv_cache_dtype or ("auto",))
        dtypes = get_args(KVDTypeChoice)
        if wrong := [name for name in names if name not in dtypes]:
            raise ConfigError("no such --kv-cache-dtype", got=", ".join(wrong), fix=f"one of {', '.join(dtypes)}")
        if self.kv_cache_dtype and not self.accelerator:
            fix = "measure a profile with `jinfercept profile --kv-cache-dtype`, or plan with --accelerator"
            raise ConfigError("--kv-cache-dtype and --profile cannot be combined", got="--kv-cache-dtype", fix=fix)
        return [dtype for dtype in dtypes if dtype in names]

    def _prices(self) -> dict[str, float]:
        prices = dict[str, float]()
        machines = {*listed(self.profile), *(name.rpartition("x")[2] for name in listed(self.accelerator))}
        for text in listed(self.price):
            name, _, price = text.rpartition("=")
            try:
                prices[name] = float(price)
            except ValueError:
                prices[name] = -1.0
            if name not in machines or not 0 <= prices[name] < float("inf"):
                raise ConfigError("--price is no price of a machine that is planned with", got=text, fix="as H100=2.5")
        return prices

    def _load(self) -> FleetLoad:
        source, rate = self._source()
        if self.rate is not None:
            rate = self.rate
        if rate is None:
            raise ConfigError("the load needs a --rate", got="no --rate", fix="give sessions per second, as --rate 2")
        limits = LatencyLimits(self.first_token_limit, self.per_token_limit)
        return FleetLoad(source, rate, self.duration, self.shared_tokens, limits, self.share, self._seeds)

    def _source(self) -> tuple[Callable[[Random], Callable[[], Script]], float | None]:
        room = self.max_model_len - self.shared_tokens
        if self.traffic is None:
            return drawer(None, self.workload, self.like, room), None
        scripts, rate = read_traffic(self.traffic)
        scripts = [without_system_prompt(script, self.shared_tokens) for script in scripts]
        longest = max(script.context for script in scripts)
        if longest >= room:
            got = f"{longest + self.shared_tokens} tokens"
            raise ConfigError("a recorded session is too long", got=got, fix="give a larger --max-model-len")
        return lambda rng: from_trace(scripts, rng), rate

    def _agrees(self, best: Sizing, load: FleetLoad, detail: Detail) -> bool:
        """Whether other seeds need as many replicas as the best plan says; prints a line."""
        enough = play_fleet(best.kind, best.replicas, load, detail).good_share
        fewer = play_fleet(best.kind, best.replicas - 1, load, detail).good_share if best.replicas > 1 else 0.0
        verdict = "agrees" if enough >= load.share > fewer else "needs more" if enough < load.share else "needs fewer"
        seeds = ", ".join(map(str, load.seeds))
        print(f"seeds {seeds}: {best.replicas} within {enough:.1%}, one fewer {fewer:.1%}: {verdict}")
        return verdict == "agrees"
