"""Names by which a server is reached."""

import pytest

from jinfercept.errors import ConfigError
from jinfercept.server.http.allowed_hosts import AllowedHosts
from jinfercept.server.options import ServerOptions

HERE = (
    "localhost",
    "localhost:8000",
    "LocalHost.:8000",
    "page.localhost",
    "127.0.0.1",
    "127.0.0.1.:80",
    "10.1.2.3:8000",
    "[::1]:8000",
    "[FE80::1%25eth0]:80",
    "[fe80::1%eth0]",
)
ELSEWHERE = (
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "evillocalhost",
    "127.0.0.1.evil.example",
    "127.0.0.1@evil.example",
    "evil.example?.localhost",
    "[evil.example]",
    "[::1].evil.example",
    "::1",
    "localhost:80:80",
    "localhost:evil",
    "",
    " ",
    "é.localhost",
)


def test_this_machine_and_addresses_are_allowed_and_no_other_names() -> None:
    hosts = AllowedHosts(())
    assert [host for host in HERE if not hosts.allows(host)] == []
    assert [host for host in ELSEWHERE if hosts.allows(host)] == []


def test_named_hosts_are_allowed_with_any_port_in_any_case() -> None:
    hosts = AllowedHosts(("LLM.Example.org", "*.internal.example"))
    for allowed in ("llm.example.org", "LLM.EXAMPLE.ORG.:8000", "a.internal.example", "a.b.internal.example:1", *HERE):
        assert hosts.allows(allowed), allowed
    for refused in ("example.org", "a.llm.example.org", "internal.example", "evilinternal.example", *ELSEWHERE):
        assert not hosts.allows(refused), refused
    assert all(AllowedHosts(("*",)).allows(host) for host in (*HERE, *ELSEWHERE))


@pytest.mark.parametrize(
    "name", ["http://a.example", "a.example:80", "a.example/x", "a.*.example", "**", "", "a b", "é", "a,b"]
)
def test_a_name_that_is_no_host_name_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        ServerOptions(allowed_hosts=(name,))


def test_hosts_are_checked_where_clients_need_no_key_or_a_flag_says_so() -> None:
    def allows(name: str, /, **options: object) -> bool:
        hosts = ServerOptions(**options).hosts()  # pyright: ignore[reportArgumentType]
        return hosts is None or hosts.allows(name)

    assert not allows("evil.example")
    assert not allows("evil.example", host="0.0.0.0")
    assert allows("box.lan", host="box.lan")
    assert allows("evil.example", api_key=("one",))
    assert allows("evil.example", operator_key=("one",))
    assert not allows("evil.example", api_key=("one",), allowed_hosts=("llm.example.org",))
    assert allows("llm.example.org", api_key=("one",), allowed_hosts=("llm.example.org",))
    assert allows("any name", uds="/run/llm.sock")
    for address in ("10.0.0.5", "::1", "[::1]"):
        ServerOptions(allowed_hosts=(address,))
