"""Draws the next tokens from logits, on the device. A row's draw depends on its own seed and position, never on the batch."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def sample(
    logits: Float[Array, "R V"],
    temperature: Float[Array, "R"],
    seed: Int[Array, "R"],
    position: Int[Array, "R"],
) -> Int[Array, "R"]:
    """One token per row: the largest logit where the temperature is 0, else a draw from `softmax(logits / temperature)`.

    Drawing is Gumbel-max with the key `fold_in(key(seed), position)`, so that a request's tokens are the same whatever runs
    beside it and however often it is interrupted.
    """
    greedy = jnp.argmax(logits, axis=-1)

    def draw() -> Int[Array, "R"]:
        def noise(seed: Int[Array, ""], position: Int[Array, ""]) -> Float[Array, "V"]:
            key = jax.random.fold_in(jax.random.key(seed), position)
            return jax.random.gumbel(key, logits.shape[-1:], jnp.float32)

        scaled = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
        drawn = jnp.argmax(scaled + jax.vmap(noise)(seed, position), axis=-1)
        return jnp.where(temperature > 0, drawn, greedy)

    return jax.lax.cond(jnp.any(temperature > 0), draw, lambda: greedy).astype(jnp.int32)
