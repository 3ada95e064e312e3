"""HTTP endpoints as tools: requests built from arguments, sent only to allowed hosts, retried if the method is idempotent.

Private addresses are allowed only for hosts that the table names.
"""

import asyncio
import ipaddress
import json
import re
import socket
import ssl
from collections.abc import Collection, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any, NamedTuple, final, override
from urllib.parse import quote

import httpx2

from jinfercept.tools.calls import CallFailed, CallRequest, check_of, texts
from jinfercept.tools.tool_tables import HttpTable, Place

_UNICAST = IPv6Network("2000::/3")  # all allocated IPv6 addresses, except embedded IPv4 addresses
_EMBEDDING = tuple(
    IPv6Network(network)
    for network in (
        "::ffff:0:0/96",  # IPv4-mapped
        "::/96",  # IPv4-compatible, deprecated
        "::ffff:0:0:0/96",  # IPv4-translated (RFC 2765)
        "64:ff9b::/96",  # NAT64 (RFC 6052)
    )
)
_ISATAP = (0x5EFE, 0x2005EFE)  # before the IPv4 address (RFC 5214)
_LOCAL: tuple[IPv4Network | IPv6Network, ...] = (  # `is_global` is True for some addresses of these
    IPv4Network("192.0.0.0/24"),  # answered by the nearest gateway
    IPv4Network("192.88.99.0/24"),  # the nearest 6to4 relay
    IPv6Network("2001::/32"),  # Teredo
    IPv6Network("3fff::/20"),  # documentation (RFC 9637)
)


_DEFAULT_PORTS = {"http": 80, "https": 443}


class AllowedHost(NamedTuple):
    """An entry of a list of allowed hosts."""

    host: str  # as `host_key` writes it; for a pattern, the domain
    port: int | None  # None: the scheme's default port and the port in the tool's own URL
    is_pattern: bool  # the entry stands for all subdomains of the host, and not for the host itself

    @classmethod
    def parse(cls, entry: str) -> "AllowedHost":
        """Parse `host`, `host:port`, or either with `*.` before it. Raises `ValueError` for anything else."""
        name = entry.removeprefix("*.")
        try:
            url = httpx2.URL(f"any://[{name}]" if is_address(name) and ":" in name else f"any://{name}")
            key = host_key(url.host)
        except httpx2.InvalidURL as error:
            raise ValueError(f"{entry}: {error}") from error
        if {*name} & {*"*/?#@ "} or not (url.port is None or 0 < url.port < 2**16):
            raise ValueError(f"{entry}: neither host nor host:port")
        return cls(key, url.port, name != entry)


@final
class Hosts:
    """A list of allowed hosts: names, addresses, or `*.domain` for all subdomains, each with or without a port.

    Raises `ValueError` if an entry is no host.
    """

    def __init__(self, allowed: Sequence[str], *, named: bool, own_port: int | None = None) -> None:
        self._entries = [AllowedHost.parse(entry) for entry in allowed]
        # named: the table lists the hosts, so its names, but not its patterns, may be at private addresses;
        # own port: in the tool's own URL
        self._named, self._own_port = named, own_port

    def _check(self, host: str, port: int, scheme: str) -> AllowedHost:
        key = host_key(host)
        # names come before patterns: only a name may be at a private address
        same = [entry for entry in self._entries if entry.host == key and not entry.is_pattern]
        same += [entry for entry in self._entries if entry.is_pattern and key.endswith(f".{entry.host}")]
        if not same:
            raise CallFailed(f"{host} is not among the hosts that this tool may talk to")
        for entry in same:
            if port == entry.port or (entry.port is None and port in (_DEFAULT_PORTS[scheme], self._own_port)):
                return entry
        raise CallFailed(f"port {port} of {host} is not among those that this tool may talk to")

    async def address(self, host: str, port: int, scheme: str = "http") -> str:
        """Resolve a host to an allowed address. Raises `CallFailed` if it has none, `OSError` if it cannot be resolved.

        Connect to the returned address: the name may resolve to another address later.
        """
        entry = self._check(host, port, scheme)
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(info[4][0]) for info in infos]
        if self._named and not entry.is_pattern:
            return addresses[0]
        for address in addresses:
            if is_public(address):
                return address
        raise CallFailed(f"{host} is at a private address; its name has to be in allow_hosts")


def host_key(host: str) -> str:
    """Normalise a host for comparison: lower case, ASCII, no final dot, addresses in their shortest form.

    Raises `ValueError` if the text is no host.
    """
    host = host.strip("[]").lower()
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        key = httpx2.URL(scheme="http", host=host).raw_host.decode("ascii").removesuffix(".")
    except httpx2.InvalidURL as error:
        raise ValueError(str(error)) from error
    if not key:
        raise ValueError("no host")
    return key


def is_public(address: str) -> bool:
    """Whether an IP address is public. For an IPv6 address that embeds an IPv4 address, the embedded address decides."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, IPv6Address):
        low = IPv4Address(int(parsed) & 0xFFFFFFFF)
        if any(parsed in network for network in _EMBEDDING):
            return is_public(str(low))
        tunnelled = low if int(parsed) >> 32 & 0xFFFFFFFF in _ISATAP else parsed.sixtofour
        if parsed not in _UNICAST or (tunnelled is not None and not is_public(str(tunnelled))):
            return False
    return parsed.is_global and not parsed.is_multicast and not any(parsed in network for network in _LOCAL)


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


_IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
_BODILESS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
_TRANSIENT = frozenset({502, 503, 504})
_MAX_REDIRECTS = 5
_FIRST_PAUSE_S = 0.2
_SHOWN_CHARS = 500
_PLACE = re.compile(r"\{(\w+)\}")


@final
class HttpTool:
    """One HTTP endpoint. Raises `ConfigError` if the URL is invalid, or an argument or an environment variable is missing."""

    def __init__(self, table: HttpTable, place: Place) -> None:
        self._table, self._tls = table, httpx2.create_ssl_context()
        self.parameters = table.parameters or texts(names_in([table.url, table.body]))
        self._check = check_of(self.parameters, place)
        url = _check_url(table, place)
        self._headers = {name: place.expand(value, f"headers.{name}") for name, value in table.headers.items()}
        own = url.netloc.rpartition(b"@")[2].decode("ascii")
        self._hosts = Hosts(table.allow_hosts or [own], named=table.allow_hosts is not None, own_port=url.port)

    async def __call__(self, request: CallRequest) -> str:
        """Send the request and return the response's text. Raises `CallFailed` for error statuses and failed connections."""
        self._check(request.arguments)
        table = self._table
        declared = self.parameters.get("properties", {}).items()
        defaults = {name: of["default"] for name, of in declared if isinstance(of, Mapping) and "default" in of}
        arguments = defaults | dict(request.arguments)
        url = httpx2.URL(fill_url(table.url, arguments))
        rest = {name: value for name, value in arguments.items() if name not in names_in(table.url)}
        body = None if table.body is None else fill_json(table.body, arguments)
        if body is None and table.method in _BODILESS and rest:
            url = url.copy_merge_params({name: _query(value) for name, value in rest.items()})
        elif body is None and table.method not in _BODILESS:
            body = rest
        text = await self._repeat(url, body, request.call.trace)
        return text if table.pointer is None else point(text, table.pointer)

    async def _repeat(self, url: httpx2.URL, body: Any, trace: Mapping[str, str]) -> str:
        # the table's headers win over those of the trace
        table, headers = self._table, {**trace, **self._headers}
        retries, pause_s = table.retries if table.method in _IDEMPOTENT else 0, _FIRST_PAUSE_S
        transport = CheckedTransport(self._hosts, url, headers, self._tls)
        async with httpx2.AsyncClient(
            transport=transport, timeout=None, trust_env=False, follow_redirects=True, max_redirects=_MAX_REDIRECTS
        ) as client:
            while True:
                try:
                    async with client.stream(table.method, url, headers=headers, json=body) as response:
                        text = await read_text(response, table.max_bytes, response.encoding or "utf-8")
                        status = response.status_code
                except httpx2.TooManyRedirects as error:
                    raise CallFailed(f"more than {_MAX_REDIRECTS} redirects") from error
                except (httpx2.TransportError, OSError) as error:
                    status, problem = None, f"{url.host} cannot be reached: {error or type(error).__name__}"
                else:
                    if status < 400:
                        return text
                    problem = f"HTTP {status}: {text[:_SHOWN_CHARS]}"
                if retries == 0 or (status is not None and status not in _TRANSIENT):
                    raise CallFailed(problem)
                await asyncio.sleep(pause_s)
                retries, pause_s = retries - 1, 2 * pause_s


@final
class CheckedTransport(httpx2.AsyncHTTPTransport):
    """Connects only to allowed addresses, also after a redirect."""

    def __init__(self, hosts: Hosts, url: httpx2.URL, headers: Collection[str], tls: ssl.SSLContext) -> None:
        super().__init__(verify=tls, trust_env=False)
        # these headers are sent only to the origin of the first request's URL
        self._hosts, self._url, self._headers = hosts, url, headers

    @override
    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        url, headers = request.url, request.headers.copy()
        if url.scheme not in _DEFAULT_PORTS:
            raise CallFailed(f"{url.scheme}: is no scheme that is followed")
        if (self._url.scheme, url.scheme) == ("https", "http"):
            raise CallFailed("a redirect from https to http is not followed")
        if url.origin != self._url.origin:
            for name in self._headers:
                headers.pop(name, None)
        host = url.raw_host.decode("ascii")
        address = await self._hosts.address(host, url.port or _DEFAULT_PORTS[url.scheme], url.scheme)
        response = await super().handle_async_request(
            httpx2.Request(
                request.method,
                url.copy_with(host=address),
                headers=headers,
                stream=request.stream,
                extensions={**request.extensions, "sni_hostname": host.removesuffix(".")},
            )
        )
        if not response.has_redirect_location:
            return response
        await response.aclose()  # the client would read the body, however long it is
        return httpx2.Response(response.status_code, headers={"location": response.headers["location"]})


async def read_text(response: httpx2.Response, max_bytes: int, encoding: str = "utf-8") -> str:
    """Read a response's text. Raises `CallFailed` if the body is longer than `max_bytes`."""
    data = bytearray()
    async for part in response.aiter_bytes():
        data += part
        if len(data) > max_bytes:
            raise CallFailed(f"the answer is longer than {max_bytes} bytes")
    return data.decode(encoding, errors="replace")


def _check_url(table: HttpTable, place: Place) -> httpx2.URL:
    names = names_in(table.url)
    try:
        url = httpx2.URL(fill_url(table.url, dict.fromkeys(names, "x")))
        key = host_key(url.host) if url.host else ""
    except (httpx2.InvalidURL, ValueError) as error:
        raise place.error(f"url is none: {error}", repr(table.url), "correct it") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise place.error("url is none", repr(table.url), 'url = "https://…"')
    if table.body is not None and table.method in _BODILESS:
        raise place.error(f"{table.method} has no body", "body", "leave it out: the arguments are the query")
    if table.parameters is not None:
        declared = table.parameters.get("properties", {})
        unknown = [name for name in names_in([table.url, table.body]) if name not in declared]
        if unknown:
            raise place.error("these arguments are not declared", ", ".join(unknown), "declare them in parameters")
    authority = table.url.partition("://")[2].partition("/")[0]
    if table.allow_hosts is None and names_in(authority):
        raise place.error("a host that the model chooses", authority, "say in allow_hosts which it may choose")
    try:
        allowed = [AllowedHost.parse(entry) for entry in table.allow_hosts or ()]
    except ValueError as error:
        fix = "host, host:port or *.domain"
        raise place.error("allow_hosts has what is no host", error, fix) from error
    named = {entry.host for entry in allowed if not entry.is_pattern}
    private = key == "localhost" or (is_address(url.host) and not is_public(url.host))
    if private and key not in named:
        raise place.error("a private address has to be allowed", url.host, f'allow_hosts = ["{url.host}"]')
    return url


def _query(value: Any) -> str | list[str]:
    if isinstance(value, list):
        return [str(_query(item)) for item in value]
    return value if isinstance(value, str) else json.dumps(value)


def names_in(template: Any) -> list[str]:
    """List the `{argument}`s of a text, or of all texts in a JSON value."""
    if isinstance(template, str):
        return list(dict.fromkeys(_PLACE.findall(template)))
    values = template.values() if isinstance(template, Mapping) else template if isinstance(template, list) else ()
    return list(dict.fromkeys(name for value in values for name in names_in(value)))


def fill_url(template: str, arguments: Mapping[str, Any]) -> str:
    """Fill a URL with escaped arguments. Raises `CallFailed` for an argument that would change the path."""

    def value(match: re.Match[str]) -> str:
        text = _text(_argument(match[1], arguments))
        if text in (".", "..") or not text:
            raise CallFailed(f"{match[1]} cannot be {text!r} in a url")
        return quote(text.encode(errors="replace"), safe="")

    return _PLACE.sub(value, template)


def fill_json(template: Any, arguments: Mapping[str, Any]) -> Any:
    """Fill in the texts of a JSON value. A text that is one `{argument}` becomes the argument, with its type.

    Members whose argument is missing are left out.
    """
    if isinstance(template, Mapping):
        return {
            key: fill_json(value, arguments)
            for key, value in template.items()
            if not (isinstance(value, str) and (whole := _PLACE.fullmatch(value)) and whole[1] not in arguments)
        }
    if isinstance(template, list):
        return [fill_json(value, arguments) for value in template]
    if not isinstance(template, str):
        return template
    if whole := _PLACE.fullmatch(template):
        return _argument(whole[1], arguments)
    return _PLACE.sub(lambda match: _text(_argument(match[1], arguments)), template)


def point(text: str, pointer: str) -> str:
    """Read the value at a JSON pointer (RFC 6901) in a text. Raises `CallFailed` if the text is no JSON or lacks the value."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CallFailed(f"the answer is no JSON: {text[:200]}") from error
    for step in pointer.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, IndexError, ValueError, TypeError):
            raise CallFailed(f"the answer has nothing at {pointer}: {text[:200]}") from None
    return _text(value)


def _argument(name: str, arguments: Mapping[str, Any]) -> Any:
    if name not in arguments:
        raise CallFailed(f"the argument {name} is missing")
    return arguments[name]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
