"""Policies, estimators and workloads of the user's own: how they are found, what is refused, what happens when they fail."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from jinfercept.cli.main import main
from jinfercept.errors import ConfigError, PluginError
from jinfercept.kv.page import Residency
from jinfercept.sched.estimator import ElapsedEstimator, Estimator, make_estimator
from jinfercept.sched.lru import CopyAhead, LeastRecentlyUsed
from jinfercept.sched.plugins import Guard, guard, label
from jinfercept.sched.policies import PolicyInputs, check_choice
from jinfercept.sched.policy import Action, Budget, Move, Mover, Policy
from jinfercept.sched.sequence import PendingCall, Sequence
from jinfercept.sim.workload import OwnWorkload
from tests.support.fake_engine import AffineCost
from tests.support.scheduler_bench import SchedulerBench, residencies

CODE = """
from dataclasses import dataclass

from jinfercept.sched.estimator import Estimator
from jinfercept.sched.policy import Action, Move, Policy
from jinfercept.sim.workload import Script, Segment


class Keep(Policy):
    def __init__(self, known):
        self.page_size, self.paused = known.page_size, {}

    def pause(self, sequence, now):
        self.paused[sequence.id] = sequence

    def resume(self, sequence, now):
        self.paused.pop(sequence.id, None)

    def victims(self, now):
        for sequence in list(self.paused.values()):
            yield Move(sequence, sequence.context.tail_first, Action.DROP, "needed")


class Lacking(Policy):
    def pause(self, sequence, now): ...


class Raising(Keep):
    def __init__(self):
        raise OSError("no table")


class TakesMore(Keep):
    def __init__(self, known, more): ...


class TakesNumber(Keep):
    def __init__(self, share: float): ...


class WrongArguments(Keep):
    def resume(self, sequence): ...


class Soon(Estimator):
    def remaining_s(self, call, age_s):
        return 1.0


@dataclass(frozen=True)
class Load:
    seconds: float = 0.5

    def __call__(self, rng):
        return Script("own", rng.randrange(1, 9), (Segment(3, self.seconds, 2), Segment(4, None, 0)))


def endless(rng):
    return Script("own", 5, (Segment(3, 0.1, 2),))


kept = Keep(type("Known", (), {"page_size": 4}))
"""

KNOWN = PolicyInputs(AffineCost(), 16, 4, ElapsedEstimator())
SEARCH = PendingCall("search", 1)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of a user's code, which can be imported as `own_code` too."""
    path = tmp_path / "own_code.py"
    path.write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return path


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    sys.modules.pop("own_code", None)


def refusal(choice: Any) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        check_choice(choice)
    return raised.value


def test_a_policy_is_a_file_a_module_a_class_a_function_or_an_object(own: Path) -> None:
    keep: Any = importlib.import_module("own_code").Keep
    for choice in (f"{own}:Keep", "own_code:Keep", f"{own}:kept", keep, lambda inputs: keep(inputs), keep(KNOWN)):
        made = KNOWN.make(choice)
        assert isinstance(made, Guard)
        assert not made.protects_paused
        assert list(made.victims(0.0)) == []
    assert label(keep) == "Keep"
    assert label(f"{own}:Keep") == f"{own}:Keep"


def test_built_in_policies_run_without_a_guard() -> None:
    assert type(KNOWN.make("copy_ahead")) is CopyAhead
    assert type(KNOWN.make(lambda inputs: CopyAhead())) is CopyAhead
    assert type(make_estimator(ElapsedEstimator)) is ElapsedEstimator


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("lro", r"no such policy; got lro \(did you mean 'lru'\?\); fix: one of discard.*path.py:Class"),
        ("nowhere.py:Keep", "no such file for a policy; got nowhere.py"),
        ("no_package.part:Keep", "no such module for a policy; got no_package.part; fix: install it or set PYTHONPATH"),
        ("{own}:", r"a policy of your own must be named as FILE.py:CLASS or MODULE:CLASS"),
        ("{own}:Kept", r"no such policy: .*own_code.py has no Kept; got .* \(did you mean 'kept'\?\); fix: one of Keep, Lack"),
        ("{own}:Lacking", r"Lacking raised when it was made; got TypeError: .* abstract methods 'resume', 'victims'"),
        ("{own}:Raising", r"Raising raised when it was made; got OSError: no table \(own_code.py, line \d+\)"),
        ("{own}:TakesMore", r"a policy is made with nothing or PolicyInputs; got .*TakesMore\(known, more\)"),
        ("{own}:TakesNumber", r"a policy is made with nothing or PolicyInputs; got .*TakesNumber\(share: float\)"),
        ("{own}:WrongArguments", r"got WrongArguments .*; fix: resume takes \(self, sequence, now\)"),
        ("{own}:Soon", r"a policy has the members of jinfercept.sched.policy.Policy; got Soon .*; fix: add requeues_at_tail"),
    ],
)  # fmt: skip
def test_a_policy_that_cannot_be_made_is_refused_with_what_is_wrong(own: Path, place: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_choice(place.format(own=own))


def test_a_file_may_import_those_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_own_code.py").write_text(CODE)
    (tmp_path / "imports_it.py").write_text("from beside_own_code import Keep as Kept\n")
    assert isinstance(KNOWN.make(f"{tmp_path / 'imports_it.py'}:Kept"), Guard)
    sys.path.remove(str(tmp_path))


def test_a_file_that_raises_is_named_with_its_line_and_runs_again_once_it_is_corrected(own: Path) -> None:
    own.write_text("import json\nraise LookupError('not yet')\n")
    error = refusal(f"{own}:Keep")
    assert "own_code.py, raises when it is imported" in error.what
    assert error.got == "LookupError: not yet (own_code.py, line 2)"
    own.write_text("def broken(:\n")
    assert "SyntaxError" in str(refusal(f"{own}:Keep").got)
    own.write_text(CODE)
    check_choice(f"{own}:Keep")


class Answers(Policy):
    """A policy whose next answer is given."""

    evicted: Any = ()

    def pause(self, sequence: Sequence, now: float) -> None: ...

    def resume(self, sequence: Sequence, now: float) -> None: ...

    def victims(self, now: float) -> Iterator[Move]:
        return self.evicted


def test_nonsense_is_an_error_that_names_the_policy_and_the_method() -> None:
    policy = Answers()
    guarded = guard("policy", policy, Policy, "own.py:Answers")
    bench = SchedulerBench(guarded)
    sequence = bench.paused("a", 9)
    told = "the policy own.py:Answers answers"
    drop, no_range = Move(sequence, range(2), Action.DROP, "why"), cast(Any, object())
    for wrong, says in (
        ([5], f"{told} 5, which is no Move of pages of a sequence, in victims"),
        ([drop._replace(pages=no_range)], f"{told} <object .* as pages of request a; a move names them by a range of "),
        (
            [drop._replace(pages=range(0, 4, 2))],
            rf"{told} range\(0, 4, 2\) as pages of request a; a move names them by ",
        ),
        (
            [drop._replace(pages=range(4))],
            rf"{told} range\(0, 4\) as pages of request a, which is intercepted and has 3,",
        ),
        ([drop._replace(action="drop")], f"{told} drop for request a, which is none of Action.DROP, "),
        (
            [drop, drop._replace(pages=range(2, 0, -1))],
            f"{told} Action.DROP of page 1 of request a twice in one order in victims",
        ),
        (None, "the policy own.py:Answers raises TypeError: 'NoneType' object is not iterable in victims"),
        (
            [drop._replace(action=Action.COPY)],
            rf"{told} Action.COPY for request a, which is none of Action.DROP, .* in victims",
        ),
    ):
        policy.evicted = wrong
        with pytest.raises(PluginError, match=says):
            list(guarded.victims(0.0))


class Copies(Policy):
    """Copies what the test says, and notes what the mover answers."""

    def __init__(self, copy: Callable[[Mover], object]) -> None:
        self.copy, self.answers = copy, list[object]()

    def pause(self, sequence: Sequence, now: float) -> None: ...

    def resume(self, sequence: Sequence, now: float) -> None: ...

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        self.answers.append(self.copy(mover))

    def victims(self, now: float) -> Iterator[Move]:
        return iter(())


def test_a_mover_answers_whether_all_pages_are_where_they_should_be() -> None:
    policy = Copies(lambda mover: None)
    bench = SchedulerBench(guard("policy", policy, Policy, "Copies"), num_host_pages=2)
    sequence = bench.paused("a", 11)
    policy.answers.clear()
    for copy in (
        lambda mover: mover.copy(sequence, "ahead", range(1)),
        lambda mover: mover.copy(sequence, "ahead"),
        lambda mover: mover.drop(sequence, "enough", range(2)),
        lambda mover: mover.uncopy(sequence, "enough", range(1, 2)),
    ):
        policy.copy = copy
        bench.step()
    assert policy.answers == [True, False, True, True]
    assert residencies(sequence) == [Residency.HOST, Residency.MISSING, Residency.DIRTY]


def test_nonsense_through_a_mover_is_an_error_that_names_the_policy_and_the_method() -> None:
    policy = Copies(lambda mover: None)
    bench = SchedulerBench(guard("policy", policy, Policy, "Copies"))
    sequence = bench.paused("a", 9)
    nothing = cast(Any, None)
    for wrong, says in (
        (
            lambda mover: mover.copy(nothing, "why"),
            "moves Move.sequence=None, .* which is no Move of pages of a sequence",
        ),
        (
            lambda mover: mover.copy(sequence, "why", range(9)),
            r"moves range\(0, 9\) as pages of request a, which is intercepted",
        ),
        (lambda mover: mover.move(sequence, "copy", "why"), "moves copy for request a, which is none of Action.COPY"),
        (
            lambda mover: [mover.copy(sequence, "why", range(1)) for _ in range(2)],
            "moves Action.COPY of page 0 of request a twice",
        ),
        (lambda mover: mover.copy(sequence, "why", 5), "moves 5 as pages of request a; a move names them by a range "),
    ):
        policy.copy = cast(Any, wrong)
        with pytest.raises(PluginError, match=f"the policy Copies {says}"):
            bench.step()


def test_an_estimator_of_the_users_own_needs_one_method_and_is_checked(own: Path) -> None:
    soon = make_estimator(f"{own}:Soon")
    assert soon.remaining_s(SEARCH, 3.0) == 1.0
    soon.started(SEARCH, 0.0)
    soon.observe(SEARCH, 2.0, clean=False)
    for nonsense in (float("nan"), -1.0, None, "1"):

        class Wrong(Estimator):
            def remaining_s(self, call: PendingCall, age_s: float, answer: Any = nonsense) -> float:
                return answer

        with pytest.raises(PluginError, match=r"Wrong answers .* in remaining_s, which is no number from 0 to inf"):
            make_estimator(Wrong).remaining_s(SEARCH, 0.0)
    with pytest.raises(ConfigError, match=r"no such estimator; got histry \(did you mean 'history'"):
        make_estimator("histry")


def test_a_workload_of_the_users_own_draws_scripts_that_can_be_played(own: Path) -> None:
    draws = [OwnWorkload(f"{own}:Load", 64).drawer(Random(3)) for _ in range(2)]
    assert [draws[0]() for _ in range(5)] == [draws[1]() for _ in range(5)]
    for choice, says in (
        (f"{own}:endless", "draws segments of which not exactly the last has no call"),
        (f"{own}:Load", r"draws a request of \d+ tokens, where fewer than 9 fit"),
        (f"{own}:kept", "a workload must be callable and return a Script"),
        (lambda rng: 5, "draws no Script; got 5"),
        (lambda rng: {}["kind"], "raises; got KeyError: 'kind'"),
    ):
        with pytest.raises(ConfigError, match=says):
            OwnWorkload(choice, 9)  # pyright: ignore[reportArgumentType]


def test_simulate_takes_all_three_and_fails_the_runs_of_a_policy_that_fails(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--estimator", f"{own}:Soon", "--workload", f"{own}:Load", "--duration", "4", "--jobs", "1"]
    assert main(["simulate", "--policy", f"{own}:Keep", *flags]) == 0
    assert f"{own}:Keep" in capsys.readouterr().out
    own.write_text(CODE + "\n\nclass Fails(Keep):\n    def moves(self, budget, now, mover):\n        now / 0.0\n")
    assert main(["simulate", "--policy", "own_code:Fails,lru", *flags]) == 1
    shown = capsys.readouterr()
    assert "PluginError: the policy own_code:Fails raises ZeroDivisionError" in shown.out
    assert [line.split()[1] for line in shown.out.splitlines()[1:]] == ["own_code:Fails", "lru"]


def test_lru_as_a_class_is_refused_since_nothing_says_whether_it_writes_through() -> None:
    assert "LeastRecentlyUsed(writes_through: bool)" in str(refusal(LeastRecentlyUsed).got)
