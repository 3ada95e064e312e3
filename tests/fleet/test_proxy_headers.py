"""Headers of requests as Ray's proxy reads them."""

from hypothesis import given
from hypothesis import strategies as st

from jinfercept.fleet.proxy_headers import CALLBACK, proxy_middleware, readable_headers
from jinfercept.fleet.ray_start import LOCAL_VARIABLES

NAMES = [b"x-session-id", b"x-request-id", b"serve_multiplexed_model_id", b"x-request-timeout-seconds", b"host"]
HEADERS = st.lists(st.tuples(st.sampled_from(NAMES), st.binary(max_size=8)), max_size=8)


@given(headers=HEADERS)
def test_all_headers_that_are_left_are_utf8_and_none_steers_ray(headers: list[tuple[bytes, bytes]]) -> None:
    kept = readable_headers(headers)
    for _, value in kept:
        assert value.decode().encode() == value
    names = [name for name, _ in kept]
    assert names.count(b"x-request-id") <= 1
    assert not {b"serve_multiplexed_model_id", b"x-request-timeout-seconds"} & set(names)
    for name in (b"x-session-id", b"host"):
        assert names.count(name) == [given for given, _ in headers].count(name)


def test_what_ray_can_read_is_unchanged_and_the_last_request_id_counts() -> None:
    given = [(b"host", b"a"), (b"x-session-id", "é".encode()), (b"x-request-id", b"one"), (b"x-request-id", b"two")]
    assert readable_headers(given) == [*given[:2], given[3]]
    assert readable_headers([(b"x-request-id", b"\xff")]) == []
    assert readable_headers([(b"x-session-id", b"\xff")]) == [(b"x-session-id", "ÿ".encode())]


def test_ray_of_the_command_calls_the_middleware() -> None:
    module, _, name = CALLBACK.partition(":")
    assert (module, name) == (proxy_middleware.__module__, proxy_middleware.__name__)
    assert LOCAL_VARIABLES["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] == CALLBACK
