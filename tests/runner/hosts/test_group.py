"""Hosts know their places by options and variables, execute the same plans, agree on sizes, end together; bytes of plans."""

import threading
import time
from array import array
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np
import pytest

from jinfercept.config import HostOptions
from jinfercept.errors import ConfigError
from jinfercept.runner.hosts import group as group_module
from jinfercept.runner.hosts.group import HostGroup, LeadingRunner, follow
from jinfercept.runner.hosts.link import Placement, place
from jinfercept.runner.hosts.wire import decode_masks, encode_masks, encode_plan
from jinfercept.sched.plan import (
    FROM_DEVICE,
    Chunk,
    Masks,
    NewPages,
    Sample,
    StepPlan,
    StepResult,
)
from tests.support.engine_requests import DEPTHS, request, serve
from tests.support.fake_engine import POLICIES, VOCAB, FakeRunner, run_all
from tests.support.fake_runner import FakeForward
from tests.support.hosts import groups, linked

PLAN = StepPlan(0, 4, (Chunk(0, 0, (1, 2), NewPages(0, array("i", [1])), Sample(0.0, 0)),))


class Ends:
    """The messages with which hosts would have ended, by host."""

    def __init__(self) -> None:
        self._lines = SimpleQueue[tuple[int, str]]()

    def __call__(self, host_id: int, message: str) -> None:
        self._lines.put((host_id, message))

    def take(self, number: int) -> dict[int, str]:
        return dict(self._lines.get(timeout=60) for _ in range(number))

    @property
    def none(self) -> bool:
        return self._lines.empty()


class HeldRunner(FakeRunner):
    """A runner that collects nothing until it may."""

    def __init__(self) -> None:
        super().__init__(4, (4, 16))
        self.free = threading.Event()
        self.masks: list[Masks] = []

    def sample(self, forward: FakeForward, masks: Masks) -> StepResult:
        self.masks.append(masks)
        return super().sample(forward, masks)

    def collect(self, ticket: StepResult) -> StepResult:
        assert self.free.wait(60)
        return ticket


def followers(hosts: list[HostGroup], runners: list[HeldRunner]) -> list[Future[None]]:
    pool = ThreadPoolExecutor(len(hosts))
    return [pool.submit(follow, runner, host) for runner, host in zip(runners, hosts[1:], strict=True)]


@DEPTHS
def test_all_hosts_execute_the_plans_of_host_0(depth: int) -> None:
    ends, runners = Ends(), [HeldRunner(), HeldRunner()]
    hosts = groups(3, ends)
    loops = followers(hosts, runners)
    for runner in runners:
        runner.free.set()
    own = FakeRunner(4, (4, 16))
    leader = LeadingRunner(own, hosts[0])
    engine = serve(
        POLICIES["swap"](), latency=lambda call: 1.0, num_pages=12, num_host_pages=20, depth=depth, runner=leader
    )
    run_all(engine, [request(str(number), [number] * 9, calls={3: [1, 2]}) for number in range(6)])
    leader.close()
    for loop in loops:
        loop.result(60)
    assert any(plan.fetch for plan in own.plans)
    for runner in runners:
        assert runner.plans == own.plans
    assert ends.none


def test_host_0_does_not_wait_for_what_the_others_execute() -> None:
    ends, runner = Ends(), HeldRunner()
    hosts = groups(2, ends)
    (loop,) = followers(hosts, [runner])
    leader = LeadingRunner(FakeRunner(4, (4, 16)), hosts[0])
    mask = np.array([7, *[0] * (VOCAB // 32)], np.uint32)
    for _ in range(20):
        leader.collect(leader.sample(leader.forward(PLAN), {0: mask}))
    assert len(runner.plans) <= 3
    runner.free.set()
    leader.reset()
    leader.close()
    loop.result(60)
    assert [masks[0].tolist() for masks in runner.masks] == [mask.tolist()] * 20


def test_hosts_agree_on_the_smallest_numbers() -> None:
    hosts = groups(3, Ends())
    proposed = [{"kv_tokens": 64, "layers": 4}, {"kv_tokens": 32, "layers": 4}, {"kv_tokens": 48, "layers": 1}]
    with ThreadPoolExecutor(3) as pool:
        agreed = list(pool.map(lambda host, numbers: host.least(numbers), hosts, proposed))
    assert agreed == [{"kv_tokens": 32, "layers": 1}] * 3


def test_a_host_that_fails_ends_all_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "REASON_S", 0.0)
    ends = Ends()
    hosts = groups(3, ends)
    runners = [FakeRunner(4, (4, 16)), FakeRunner(4, (4, 16), fail_at=2)]
    pool = ThreadPoolExecutor(2)
    loops = [pool.submit(follow, runner, host) for runner, host in zip(runners, hosts[1:], strict=True)]
    leader = LeadingRunner(FakeRunner(4, (4, 16)), hosts[0])
    for _ in range(2):
        leader.submit(PLAN)
    reasons = ends.take(3)
    assert reasons == dict.fromkeys(range(3), "host 2 failed: RuntimeError: the device is gone")
    with pytest.raises(RuntimeError, match="the device is gone"):
        loops[1].result(60)


def test_a_lost_connection_ends_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "REASON_S", 0.0)
    ends = Ends()
    (first, peers), (killed, _), (third, others) = linked(3)
    HostGroup(0, first, peers, lambda message: ends(0, message))
    HostGroup(2, third, others, lambda message: ends(2, message))
    killed.close()
    message = "host 1 was lost (the connection was closed); all hosts end, start them again"
    assert ends.take(2) == {0: message, 2: message}


def test_the_end_of_host_0_ends_the_others() -> None:
    ends = Ends()
    (first, _), (second, peers) = linked(2)
    HostGroup(1, second, peers, lambda message: ends(1, message))
    first.close()  # it is killed
    assert ends.take(1) == {1: "host 0 was lost (the connection was closed); all hosts end, start them again"}


def test_an_end_in_order_is_no_failure() -> None:
    ends = Ends()
    hosts = groups(2, ends)
    (loop,) = followers(hosts, [HeldRunner()])
    hosts[0].close()
    loop.result(60)
    hosts[0].fail("too late")
    time.sleep(0.1)
    assert ends.none


def test_a_process_serves_alone_unless_an_option_asks_for_several_hosts() -> None:
    assert place(HostOptions()) is None


def test_options_say_all() -> None:
    assert place(HostOptions("10.1.2.3:7000", 4, 1)) == Placement("10.1.2.3", 7000, 4, 1)
    assert place(HostOptions("[fd00::1]:7000", 2, 0)) == Placement("fd00::1", 7000, 2, 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (HostOptions("a:1"), "several hosts need three options"),
        (HostOptions("a:1", 2), "got one or two of them; fix: give --coordinator"),
        (HostOptions(num_hosts=3), "several hosts need three options"),
        (HostOptions("a:1", 2, 2), "--host-id must be below --num-hosts; got host 2 of 2"),
        (HostOptions("a", 2, 1), "--coordinator must be the address and a port of host 0; got a"),
        (HostOptions("a:65535", 2, 1), "a port up to 65534"),
    ],
)
def test_what_is_missing_or_wrong(options: HostOptions, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        place(options)
    assert words in str(error.value)


def test_a_decode_row_takes_few_bytes() -> None:
    row = Chunk(200, 4000, (FROM_DEVICE,), (), Sample(0.7, 0xFFFFFFFF))
    assert len(encode_plan(StepPlan(7, 256, (row,) * 256))) < 35 * 256


def test_masks_arrive_as_they_were_sent() -> None:
    masks = {5: np.array([0, 12345, 0xFFFFFFFF], np.uint32), 0: np.full(4008, 77, np.uint32)}
    arrived = decode_masks(encode_masks(masks))
    assert list(arrived) == list(masks)
    for row, words in masks.items():
        np.testing.assert_array_equal(arrived[row], words, strict=True)
