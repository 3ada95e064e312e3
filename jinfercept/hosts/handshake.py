"""How the hosts of a group find each other: the others connect to host 0 with the token's key, and say what they run.

All start, or none: if one is missing, comes twice or runs something else, every host that has come gets the same `ConfigError`.
"""

import logging
import time
from collections.abc import Mapping
from contextlib import suppress

from jinfercept.errors import ConfigError
from jinfercept.hosts.link import HostLink, Kind
from jinfercept.hosts.placement import TOKEN_VARIABLE, Placement
from jinfercept.hosts.wire import decode_values, encode_values

log = logging.getLogger(__name__)

_ANSWER_S = 10.0
"""Seconds for host 0's answer, beyond those for which it waits for others."""
_WAIT_S = 0.1


def meet(
    placement: Placement, facts: Mapping[str, str], token: str, timeout_s: float
) -> tuple[HostLink, dict[int, bytes]]:
    """This host's link, and its connection of every host at the other end. Raises `ConfigError`.

    Args:
        facts: what has to be the same on every host, by name.
        token: the secret; empty: none.
    """
    if placement.host_id:
        return _join(placement, facts, token, timeout_s), {0: b""}
    link = HostLink(placement, token)
    came: list[bytes] = []
    try:
        return link, _gather(link, came, placement, facts, timeout_s)
    except ConfigError as error:
        for peer in came:
            refuse(link, peer, error)
        link.close()
        raise


def refuse(link: HostLink, peer: bytes, error: ConfigError) -> None:
    """Tell a host why it cannot come."""
    with suppress(ConnectionError):
        link.send(Kind.REFUSED, encode_values({"what": error.what, "got": str(error.got), "fix": error.fix}), peer)


def _gather(
    link: HostLink, came: list[bytes], placement: Placement, facts: Mapping[str, str], timeout_s: float
) -> dict[int, bytes]:
    """The connections of all other hosts; `came` gets those of all that ask. Raises `ConfigError`."""
    deadline = time.monotonic() + timeout_s
    hosts: dict[int, bytes] = {}
    while missing := sorted({*range(1, placement.num_hosts)} - {*hosts}):
        if time.monotonic() > deadline:
            name = "host" if len(missing) == 1 else "hosts"
            raise ConfigError(
                f"{name} {', '.join(map(str, missing))} of {placement.num_hosts} did not come within {timeout_s:g} s",
                got=f"{placement.num_hosts - len(missing)} hosts",
                fix="start all, with this --coordinator and --num-hosts; --host-timeout waits longer",
            )
        link.wait()
        hellos = [frame for frame in link.receive() if frame.kind == Kind.HELLO]
        hosts = {host_id: peer for host_id, peer in hosts.items() if not link.is_lost(peer)}  # it may come again
        for _, body, peer in hellos:
            try:
                values = decode_values(body)
                hello = int(values["host_id"]), int(values["num_hosts"]), dict[str, str](values["facts"])
            except (ValueError, TypeError, KeyError):
                continue  # it is no host
            came.append(peer)
            hosts[_checked(*hello, placement, facts, hosts)] = peer
            log.info("host %d of %d has come", len(hosts), placement.num_hosts - 1)
    for host_id, peer in hosts.items():
        try:
            link.send(Kind.WELCOME, peer=peer)
        except ConnectionError as error:
            what = f"host {host_id} was lost while the others came"
            raise ConfigError(what, got=error, fix="start all again") from error
    return hosts


def _checked(
    host_id: int,
    stated_hosts: int,
    stated: Mapping[str, str],
    placement: Placement,
    facts: Mapping[str, str],
    hosts: Mapping[int, bytes],
) -> int:
    """The number of a host that may come. Raises `ConfigError`."""
    num_hosts = placement.num_hosts
    if stated_hosts != num_hosts:
        raise ConfigError(
            "the hosts do not agree on their number",
            got=f"{num_hosts} on host 0, {stated_hosts} on host {host_id}",
            fix="start all with the same --num-hosts",
        )
    if host_id in hosts:
        raise ConfigError(
            "two hosts have the same number", got=f"host {host_id} twice", fix="give each a --host-id of its own"
        )
    if stated != facts:
        got = "; ".join(
            f"{name} {str(facts.get(name))[:80]} on host 0, {str(stated.get(name))[:80]} on host {host_id}"
            for name in sorted(facts.keys() | stated.keys())
            if facts.get(name) != stated.get(name)
        )
        fix = "start all with the same versions, options and model"
        raise ConfigError("the hosts do not run the same", got=got, fix=fix)
    return host_id


def _join(placement: Placement, facts: Mapping[str, str], token: str, timeout_s: float) -> HostLink:
    """The link of another host to host 0, which may start later. Raises `ConfigError` if there is none, or it refuses."""
    address = placement.plans_address
    late = ConfigError(
        f"host 0 does not answer within {timeout_s:g} s",
        got=address,
        fix="start it, and check --coordinator; --host-timeout waits longer",
    )
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            link = HostLink(placement, token)
            break
        except OSError:  # the name of host 0 is not known yet
            if time.monotonic() > deadline:
                raise late from None
            time.sleep(_WAIT_S)
    values = {"host_id": placement.host_id, "num_hosts": placement.num_hosts, "facts": dict(facts)}
    link.send(Kind.HELLO, encode_values(values))
    is_open = False
    while not (frames := link.receive()):
        problem = None
        if link.is_refused:
            problem = ConfigError(
                "this host has another token than host 0, or what listens there is no host",
                got=address,
                fix=f"set ${TOKEN_VARIABLE} alike on all, and see --coordinator",
            )
        elif is_open and link.is_lost(b""):
            problem = ConfigError("host 0 ended the start", got=address, fix="see what host 0 says")
        elif time.monotonic() > deadline + _ANSWER_S * is_open:
            problem = late
        if problem is not None:
            link.close()
            raise problem
        is_open = not link.is_lost(b"")
        link.wait()
    kind, body, _ = frames[0]
    if kind == Kind.WELCOME:
        return link
    link.close()
    # without what a terminal would obey
    refusal = {name: "".join(c if c.isprintable() else "?" for c in text) for name, text in decode_values(body).items()}
    raise ConfigError(f"host 0 refuses: {refusal['what']}", got=refusal["got"], fix=refusal["fix"])
