"""Random moves of states of recurrent layers between devices and host, checked number by number."""

import random
from itertools import batched, chain
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jinfercept.kv.page import PageCopy
from jinfercept.models.mesh import ModelMesh, place
from jinfercept.pallas.layouts.states import StateArray
from jinfercept.runner.executables import Executables
from jinfercept.runner.packing import MOST_TRANSFERS, CommonShape
from jinfercept.runner.packing_samples import NUM_FIELDS
from jinfercept.runner.page_transfers import slot_bytes, state_shapes
from jinfercept.runner.pools import Pool

NUM_STATES, NUM_HOST = 40, 50
STATES = (
    (StateArray((3, 8, 5), None, 1), StateArray((8, 2, 3), "float32", 0)),
    (),  # a layer with pages
    (StateArray((4,), None), StateArray((2, 16), "float32", 1)),
)


def check_random_moves(mesh: ModelMesh, seed: int, num_steps: int = 12) -> Executables:
    """Steps that move any number of states; returns the executables."""
    rng, common = random.Random(seed), CommonShape(1, 1)
    like = jax.ShapeDtypeStruct((), jnp.bfloat16, sharding=mesh.sharding())
    states = Pool(dict(enumerate(state_shapes(STATES, NUM_STATES, like))), common, moved_pages=rng.randint(1, 30))
    run = Executables()
    states.add_executables(run)
    states.reset()
    states.layers = jax.tree.map(_numbered, states.layers)
    device, host = {slot: slot for slot in range(NUM_STATES + 1)}, dict[int, int]()
    for _ in range(num_steps):
        device_slots = rng.sample(range(1, NUM_STATES + 1), NUM_STATES)
        fetched = rng.sample(sorted(host), rng.randint(0, min(len(host), NUM_STATES // 2)))
        fetch = [PageCopy(device_slots.pop(), slot) for slot in fetched]
        landed = {copy.device_slot: host[copy.host_slot] for copy in fetch}
        drop = rng.sample(sorted(host), rng.randint(0, len(host)))
        for slot in drop:
            del host[slot]
        free = [slot for slot in range(NUM_HOST) if slot not in host]
        leaving = rng.sample(free, min(len(free), rng.randint(0, len(device_slots))))
        offload = [PageCopy(device_slots.pop(), slot) for slot in leaving]
        host |= {copy.host_slot: device[copy.device_slot] for copy in offload}
        device |= landed
        transfers, blank = states.begin(fetch, drop, offload), np.zeros((NUM_FIELDS, 0), np.int32)
        groups = [common.pack(blank, group) for group in batched(transfers, MOST_TRANSFERS)]
        states.commons = place(groups, mesh.sharding())
        states.fetch()
        states.offload()
        states.scatter()
        states.wait()
        assert states.host.keys() == host.keys()
        for array, _ in states.host.values():
            copied = cast(Any, array.data)
            assert [array.dtype for array in copied] == [jnp.bfloat16, jnp.float32]
            local = sum(shard.data.nbytes for array in copied for shard in array.addressable_shards)
            assert local == mesh.size * slot_bytes(STATES, jnp.bfloat16, mesh.size)
    for index, array in enumerate(chain.from_iterable(states.layers)):
        numbers = np.asarray(array).reshape(NUM_STATES + 1, -1)
        expected = np.asarray(_numbered(jnp.zeros_like(array))).reshape(numbers.shape)
        for slot, number in device.items():
            np.testing.assert_array_equal(numbers[slot], expected[number], err_msg=str(index))
    return run


def _numbered(array: jax.Array) -> jax.Array:
    """Other numbers in every slot and place."""
    numbers = np.arange(array.size).reshape(len(array), -1) * 7 % 251
    return jax.device_put(
        (numbers + np.arange(len(array))[:, None]).reshape(array.shape).astype(array.dtype), array.sharding
    )
