"""`python -m studies calls`: scripts of calls, its tables and files, in virtual time."""

from itertools import permutations
from pathlib import Path
from random import Random
from typing import get_args

import pytest

from jinfercept.calls import CallMode
from jinfercept.errors import ConfigError
from jinfercept.sched.named_profiles import PROFILES
from jinfercept.sched.profile import Profile
from jinfercept.sim.run_stats import Report
from studies.__main__ import main
from studies.calls.alone import LONGEST_FIRST, AloneCell, at_token_s, excess, play_cell
from studies.calls.markup import CallArrival, make_call_request, scripted_tokenizer, text_of
from studies.calls.scripts import CallMix, CallScript, ScriptedCall, formula_s, priced
from studies.calls.simulation import CallSimulation

GPTJ, LLAMA = PROFILES["paper-gptj-6b-a100"], PROFILES["roofline-llama-3-70b-4xa100"]
MIXES = (CallMix(1), CallMix(2, 0.9), CallMix(5, 0.5, 2, "heavy"), CallMix(16, 0.2), CallMix(8, 0.6, 4))


def alone(script: CallScript, profile: Profile, depth: int = 0) -> Report:
    """A request on an engine that serves nothing else."""
    pools = {"kv_tokens": 4096, "host_tokens": 0, "max_model_len": 4096}
    machine = CallSimulation(profile, "preserve", duration_s=1e5, chunked_prefill=True, depth=depth, **pools)  # pyright: ignore
    return machine.run([CallArrival(0.0, script)])


def test_a_script_is_written_with_as_many_tokens_as_it_says() -> None:
    calls = (ScriptedCall("short", 24, 0.25, 3, prose=2), ScriptedCall("heavy", 22, 1.5, 4))
    script = CallScript(5, (calls, calls[:1]), answer=3)
    assert text_of(script) == (
        "[CALL]1[HEAD]short(0.25,3)       [END]..[CALL]2[HEAD]heavy(1.5,4)      [END][TRAP][END]"
        "[CALL]3[HEAD]short(0.25,3)       [END]..[TRAP][END]..."
    )
    request = make_call_request(7, script)
    tokens = scripted_tokenizer().encode(text_of(script))
    assert request.params.max_tokens == len(tokens) == script.generated == 24 + 2 + 22 + 2 + 24 + 2 + 2 + 3
    assert [call for written_round in script.written_rounds() for call in written_round.calls] == [
        (24, 0.25),
        (48, 1.5),
        (74, 0.25),
    ]
    assert [written_round.trap for written_round in script.written_rounds()] == [50, 78]


@pytest.mark.parametrize(
    ("mix", "profile"),
    [
        pytest.param(mix, profile, id=f"{mix}, {profile.name}", marks=() if place % 2 == machine else pytest.mark.slow)
        for place, mix in enumerate(MIXES)
        for machine, profile in enumerate((GPTJ, LLAMA))
    ],
)
def test_a_request_alone_takes_as_long_as_the_formula_says(mix: CallMix, profile: Profile) -> None:
    """The engine's clock adds nothing but the seconds in which the device reads interrupts: all of them where no call runs
    meanwhile, and at most all of them where calls are asynchronous."""
    for seed in range(2):
        drawn = mix.draw(Random(seed))
        written = priced(drawn, profile)
        for calls in get_args(CallMode):
            script = drawn._replace(calls=calls)
            report = alone(script, profile)
            excess_s = report["latency_s"]["mean"] - formula_s(script, written)
            reading_s = report["step_s"]["priced"] - written(script.generated)
            assert 0 < reading_s < 0.2 * profile.step_s(1, 0) * (mix.calls + 2)
            assert -1e-9 < excess_s < reading_s + 1e-9
            assert calls == "async" or excess_s == pytest.approx(reading_s)


def test_at_depth_1_every_result_costs_one_step_at_most() -> None:
    """The sample in flight behind which an interrupt stands is void, and drawn again."""
    for mix in MIXES:
        script = mix.draw(Random(3))
        excess_s = alone(script, GPTJ, depth=1)["latency_s"]["mean"] - formula_s(script, priced(script, GPTJ))
        assert -GPTJ.step_s(1, 0) < excess_s < 1.1 * (mix.calls + 1) * GPTJ.step_s(1, 0)


def test_no_order_is_faster_than_the_longest_first() -> None:
    for seed in range(20):
        script = CallMix(5, 0.3, tool="heavy").draw(Random(seed))
        written = priced(script, LLAMA)
        best_s = formula_s(script.longest_first, written)
        (calls,) = script.rounds
        for order in permutations(calls):
            placed = tuple(call._replace(prose=place.prose) for call, place in zip(order, calls, strict=True))
            assert best_s <= formula_s(script._replace(rounds=(placed,)), written) + 1e-9


def test_what_cannot_be_scripted_is_refused() -> None:
    for wrong in ({"tool": "slow"}, {"rounds": 3}, {"prose": 1.0}):
        with pytest.raises(ConfigError):
            CallMix(**{"calls": 2} | wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="an oracle cannot see calls in markup"):
        CallSimulation(GPTJ, "lru", "oracle").run([CallArrival(0.0, CallMix(1).draw(Random(0)))])


def test_the_command_prints_a_table_and_writes_it_with_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("studies.calls.command.QUICK_CALLS", (1, 4))
    page, picture = tmp_path / "calls.md", tmp_path / "calls.svg"
    assert main(["calls", "--quick", "--jobs", "1", "--markdown", str(page), "--plot", str(picture)]) == 0
    shown = capsys.readouterr()
    assert "heavy-tailed" in shown.out
    assert "steps; this reading took at most" in shown.out
    assert page.read_text().count("\n|---:") == 1
    assert picture.stat().st_size > 10_000


def test_a_cell_has_every_speed_up_and_a_faster_machine_gains_more() -> None:
    machine = PROFILES["paper-gptj-6b-a100"]
    rows = [play_cell(AloneCell(CallMix(4, 0.25), at_token_s(machine, token_s), 2, 0)) for token_s in (0.002, 0.02)]
    assert [row["token_ms"] for row in rows] == [2.0, 20.0]
    for row in rows:
        parallel, ours, best = (row["speedup"][way] for way in ("parallel", "async", LONGEST_FIRST))
        assert 1 < parallel <= ours <= best < 1 + row["work"]
    assert rows[0]["speedup"]["async"] > rows[1]["speedup"]["async"]
    least, most, _ = excess(rows)
    assert least == pytest.approx(0.0, abs=1e-6)
    assert most == pytest.approx(0.0, abs=1e-6)
