"""Room that tenants share: a full one costs those that hold the most, and nobody who holds an equal share at most."""

from hypothesis import given
from hypothesis import strategies as st

from jinfercept.sched.tenants import ExpiringEntries, Quota
from jinfercept.serve.server_tools import num_bytes_of


def test_the_tenant_with_the_most_loses_its_least_recently_used_entry():
    entries = ExpiringEntries[int](Quota(9, 10), 10.0, lambda: 0.0)
    for number, name in enumerate("xyz"):
        entries.put("a", name, number, 3)
    assert entries.use("x") == 0
    entries.put("b", "of b", 7, 3)
    assert entries.use("y") is None
    assert [entries.use(name) for name in ("x", "z", "of b")] == [0, 2, 7]


def test_an_entry_that_is_put_again_or_removed_gives_its_bytes_back():
    entries = ExpiringEntries[int](Quota(9, 10), 10.0, lambda: 0.0)
    for number in range(4):
        entries.put("a", "x", number, 8)
    assert entries.use("x") == 3
    entries.remove("x")
    entries.remove("x")
    entries.put("a", "y", 4, 10)
    assert entries.use("y") == 4
    assert len(entries) == 1


OWNERS = "abcde"


def drop_all(quota: Quota, tenants: dict[str, str], tenant: str) -> list[str]:
    """Names of the entries that a change of a tenant's costs, in order."""
    dropped: list[str] = []
    while (name := quota.victim(tenant)) is not None:
        quota.remove(tenants[name], name)
        dropped.append(name)
    return dropped


@given(
    steps=st.lists(st.tuples(st.sampled_from(OWNERS), st.integers(0, 40)), max_size=60),
    most=st.integers(0, 12),
    most_bytes=st.integers(0, 200),
    of_tenant=st.none() | st.integers(0, 8),
)
def test_a_tenant_that_stays_under_an_equal_share_loses_nothing(
    steps: list[tuple[str, int]], most: int, most_bytes: int, of_tenant: int | None
) -> None:
    tenants = {f"{number}": tenant for number, (tenant, _) in enumerate(steps)}
    sizes = {f"{number}": size for number, (_, size) in enumerate(steps)}
    quota = Quota[str](most, most_bytes, most_of_tenant=of_tenant)
    left: list[str] = []
    for name, tenant in tenants.items():
        quota.add(tenant, name, sizes[name])
        left.append(name)
        while (lost := quota.victim(tenant)) is not None:
            holding = [other for other in left if tenants[other] == tenants[lost]]
            num_bytes, num_tenants = sum(sizes[other] for other in holding), len({tenants[other] for other in left})
            above = len(holding) > most / num_tenants or num_bytes > most_bytes / num_tenants
            own = of_tenant is not None and tenants[lost] == tenant and len(holding) > of_tenant
            shares = [[other for other in left if tenants[other] == owner] for owner in OWNERS]
            of_bytes = len(left) <= most
            size_of = (lambda names: sum(sizes[name] for name in names)) if of_bytes else len
            assert own or (above and size_of(holding) == max(map(size_of, shares)))
            assert lost == holding[0]
            quota.remove(tenants[lost], lost)
            left.remove(lost)
        assert len(left) <= most
        assert sum(sizes[other] for other in left) <= most_bytes


def test_a_tenant_has_a_limit_of_its_own() -> None:
    quota = Quota[str](100, 1000, most_of_tenant=2)
    tenants = dict.fromkeys("1234", "a") | {"5": "b"}
    sizes = {"1": 10, "2": 10, "3": 10, "4": 45, "5": 50}
    lost: list[str] = []
    for name, tenant in tenants.items():
        quota.add(tenant, name, sizes[name])
        lost += drop_all(quota, tenants, tenant)
    assert lost == ["1", "2"]


def test_what_occurs_twice_in_a_value_counts_once_and_many_small_things_count_as_what_they_take() -> None:
    text = {"type": "input_text", "text": "x" * 50_000}
    assert 50_000 < num_bytes_of([text]) < 51_000
    assert num_bytes_of(([text, dict(text)], text)) < 52_000
    empty = [{"id": f"{number}", "content": []} for number in range(1000)]
    assert 200_000 < num_bytes_of(empty) < 500_000
