"""Sessions of agents by their lengths: prompts grow by answers and new tokens, and shrink where the history was rewritten."""

from random import Random

from benchmarks.agents import AgentCall, Scale, load_sessions, prompts_of


def test_the_shipped_sessions_are_sixteen_of_fourteen_calls() -> None:
    sessions = load_sessions(Scale(0.03, 0.05, 0.1))
    assert [len(session) for session in sessions] == [14] * 16
    assert all(300 < call.prompt < 2000 and call.new > 0 for session in sessions for call in session)
    assert sum(call.kept is not None for session in sessions for call in session) < 2 * len(sessions)


def test_a_prompt_goes_on_from_the_answer_or_from_what_the_history_kept() -> None:
    session = [AgentCall(5, 2, 0, 0.0), AgentCall(10, 2, None, 1.0), AgentCall(4, 2, 3, 1.0)]
    calls = prompts_of(session, Random(0))
    first, second, third = next(calls), calls.send([7, 8]), calls.send([9, 9])
    assert [prompt.known for prompt in (first, second, third)] == [0, 7, 3]
    first, second, third = first.tokens, second.tokens, third.tokens
    assert (len(first), second[:7], len(second)) == (5, [*first, 7, 8], 10)
    assert (third[:3], len(third)) == (second[:3], 4)
