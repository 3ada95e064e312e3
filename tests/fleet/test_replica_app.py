"""What tells a replica from another one of the same options."""

from jinfercept.fleet.replica_app import own_seed


def test_replicas_have_seeds_of_their_own_which_depend_on_the_fleets() -> None:
    seeds = [own_seed(seed, name) for seed in (0, 1) for name in ("one", "two")]
    assert len(set(seeds)) == 4
    assert own_seed(0, "one") == seeds[0]
