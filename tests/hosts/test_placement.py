"""Which host a process is, by options and by clusters' variables."""

import pytest

from jinfercept.config import HostOptions
from jinfercept.errors import ConfigError
from jinfercept.hosts.placement import Placement, first_node, place

SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_ID": "70001",
    "SLURM_STEP_NODELIST": "gpu[07-09,12],login1",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
POD_NAME = "llama-2.llama.default.svc.cluster.local"


def test_a_process_serves_alone_unless_an_option_asks_for_several_hosts() -> None:
    assert place(HostOptions(), SLURM, "gpu12") is None


def test_options_say_all() -> None:
    options = HostOptions("10.1.2.3:7000", 4, 1)
    assert place(options, {}, "here") == Placement("10.1.2.3", 7000, 4, 1)
    assert place(HostOptions("[fd00::1]:7000", 2, 0), {}, "here") == Placement("fd00::1", 7000, 2, 0)


def test_slurm_says_what_options_leave_open() -> None:
    placement = place(HostOptions("auto"), SLURM, "gpu12")
    assert placement == Placement("gpu07", 61440 + 2 * 70001 % 4096, 4, 3)
    assert place(HostOptions("gpu07:9000"), SLURM, "gpu12") == Placement("gpu07", 9000, 4, 3)


@pytest.mark.parametrize("nodes", ["gpu07", "gpu07,gpu08", "gpu[07,12]", "gpu[07-12]", "gpu0[7-9],x[1-2]"])
def test_the_first_node_of_slurms_lists(nodes: str) -> None:
    assert first_node(nodes) == "gpu07"


def test_the_first_node_of_a_list_with_a_suffix() -> None:
    assert first_node("rack[1-2]-eth,other") == "rack1-eth"


def test_kubernetes_numbers_pods() -> None:
    by_name = place(HostOptions(num_hosts=3), POD, POD_NAME)
    by_index = place(HostOptions(num_hosts=3), {**POD, "JOB_COMPLETION_INDEX": "2"}, POD_NAME)
    assert by_name == by_index == Placement("llama-0.llama.default.svc.cluster.local", 5000, 3, 2)


def test_a_leader_worker_set_says_all() -> None:
    variables = {**POD, "LWS_LEADER_ADDRESS": "lws-0.lws", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
    assert place(HostOptions("auto"), variables, "lws-0-1.lws") == Placement("lws-0.lws", 5000, 2, 1)


@pytest.mark.parametrize(
    ("options", "variables", "words"),
    [
        (HostOptions("auto"), {}, "several hosts need --coordinator and --num-hosts and --host-id"),
        (HostOptions("a:1", 2), {}, "several hosts need --host-id; got neither an option nor a variable of no cluster"),
        (
            HostOptions(num_hosts=3),
            POD,
            "need --coordinator and --host-id; got neither an option nor a variable of Kub",
        ),
        (HostOptions("auto", 8), SLURM, "--num-hosts is not what Slurm says; got 8, not 4"),
        (HostOptions("a:1", 2, 2), {}, "--host-id must be below --num-hosts; got host 2 of 2"),
        (HostOptions("a", 2, 1), {}, "--coordinator must be the address and a port of host 0; got a"),
        (HostOptions("a:65535", 2, 1), {}, "a port up to 65534"),
    ],
)
def test_what_is_missing_or_wrong(options: HostOptions, variables: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        place(options, variables, "here")
    assert words in str(error.value)
