"""Tables of entries that expire, shared by tenants."""

from jinfercept.tenants.quota import ExpiringEntries, Quota


def test_an_entry_lives_on_from_its_last_use():
    now = [0.0]
    entries = ExpiringEntries[str](Quota(9), 10.0, lambda: now[0])
    entries.put("a", "x", "of x", 1)
    now[0] = 8.0
    assert entries.use("x") == "of x"
    now[0] = 17.0
    assert entries.use("x") == "of x"
    now[0] = 27.0
    assert entries.use("x") is None
    assert entries.peek("x") == "of x"
    entries.put("a", "y", "of y", 1)
    assert entries.peek("x") is None
    assert len(entries) == 1


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
