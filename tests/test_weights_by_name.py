"""Weights of an update by their names: states and modules of Flax, checkpoints' names, and parts of the weights."""

import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jinfercept.errors import ModelError, RequestError
from jinfercept.llm import LLM
from jinfercept.models.joined_weights import separate
from jinfercept.models.model import untied
from jinfercept.models.named_weights import by_name
from jinfercept.models.protocol import Params
from jinfercept.sampling_params import SamplingParams
from tests.support.tiny_model import GOLDEN, tiny_llm

sys.path.append(str(GOLDEN.parents[1] / "examples"))
FAMILIES = [
    "gptj",
    "gemma3",
    "gemma4_e2b",
    "phi3",
    "qwen3_moe",
    "qwen3_next",
    "nemotron_h",
    "gpt_oss",
    "llama_tied",
    "mixtral",
    "qwen3_5",
]


def written(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    return llm.generate({"prompt_token_ids": list(range(12))}, params)[0].outputs[0].token_ids


def tensors(name: str) -> dict[str, np.ndarray]:
    return {
        key: leaf for file in sorted((GOLDEN / name).glob("*.safetensors")) for key, leaf in load_file(file).items()
    }


def served(llm: LLM) -> Params:
    whole = untied(llm.model.config, separate(llm.params))  # pyright: ignore[reportArgumentType]
    return Params(*jax.tree.map(np.array, whole))


def changed(weights: Any) -> Any:
    return jax.tree.map(lambda leaf: np.flip(leaf, -1).copy(), weights)


def equal(first: Params, second: Params) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, first, second))


@pytest.mark.parametrize("name", ["llama_gqa", *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES)])
def test_tensors_of_a_checkpoint_in_memory_are_what_its_files_are(name: str) -> None:
    with tiny_llm(name) as llm:
        expected, first = served(llm), written(llm)
        llm.update_weights(changed(expected))
        assert not equal(served(llm), expected)
        for place in (np.asarray, jax.numpy.asarray):
            llm.update_weights(changed(expected))
            llm.update_weights({key: place(leaf) for key, leaf in tensors(name).items()})
            assert equal(served(llm), expected)
        assert written(llm) == first


def test_states_and_mappings_of_names_are_params() -> None:
    with tiny_llm() as llm:
        embed, layers, head = served(llm)
        other = changed(Params(embed, layers, head))
        nested = {"embed": other.embed, "layers": dict(enumerate(other.layers)), "head": other.head}
        flat = {("layers", i, name): leaf for i, layer in enumerate(other.layers) for name, leaf in layer.items()}
        state = nnx.State(jax.tree.map(lambda leaf: nnx.Param(jax.numpy.asarray(leaf)), nested))
        theirs = {f"blocks.{i}.{name}.w": leaf for (_, i, name), leaf in flat.items()}
        names = {"blocks.*.q.w": "layers.*.q", "tokens": "embed.embedding"}
        names |= {f"blocks.*.{name}.w": f"layers.*.{name}" for name in layers[0]}
        head_flat = {f"head.{name}": leaf for name, leaf in other.head.items()}
        cases: list[tuple[Mapping[Any, Any], dict[str, Any]]] = [
            (nested, {}),
            ({**flat, "embed.embedding": other.embed["embedding"], **head_flat}, {}),
            (state, {}),
            ({**theirs, "tokens": other.embed["embedding"], **head_flat}, {"names": names}),
        ]
        for weights, options in cases:
            llm.update_weights(Params(embed, layers, head))
            llm.update_weights(weights, **options)
            assert equal(served(llm), other)


def test_what_only_leaves_out_stays_as_it_is() -> None:
    with tiny_llm() as llm:
        first = served(llm)
        other = changed(first)

        def expect(only: Any, counts: Any, weights: Any = other) -> None:
            before = by_name(served(llm))
            llm.update_weights(weights, only=only, mode="keep")
            given = by_name(other)
            for name, leaf in by_name(served(llm)).items():
                assert np.array_equal(leaf, (given if counts(name) else before)[name]), name

        expect("layers.1.", lambda name: name.startswith("layers.1."))
        llm.sleep(2)
        expect_asleep = {"layers": {0: {"q": other.layers[0]["q"]}}}
        llm.update_weights(expect_asleep, only="layers", mode="keep")
        llm.update_weights({"head": other.head}, only="head", mode="keep")
        llm.wake()
        assert np.array_equal(served(llm).layers[0]["q"], other.layers[0]["q"])
        assert np.array_equal(served(llm).layers[0]["k"], first.layers[0]["k"])
        assert equal(Params({}, (), served(llm).head), Params({}, (), other.head))
        llm.update_weights(first)
        expect(lambda name: name.endswith((".q", ".down")), lambda name: name.endswith((".q", ".down")))
        expect(["embed", "head.norm"], lambda name: name.startswith(("embed", "head.norm")))
        expect("layers.0.k", lambda name: name == "layers.0.k", {"layers": {0: {"k": other.layers[0]["k"]}}})
        llm.update_weights(first)
        places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(llm.params)]
        llm.update_weights(other, only="layers.1.attn_norm", mode="keep")
        leaves = jax.tree.leaves(llm.params)
        assert [leaf.unsafe_buffer_pointer() for leaf in leaves] == places
        assert not any(leaf.is_deleted() for leaf in leaves)


def test_names_that_do_not_fit_change_nothing() -> None:
    files = tensors("llama_gqa")
    name, bare = "model.layers.0.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight"
    with tiny_llm() as llm:
        first = served(llm)
        own = {"embed": first.embed, "layers": dict(enumerate(first.layers)), "head": first.head}
        cases: list[tuple[Any, dict[str, Any], str]] = [
            ({}, {}, "no weights were given"),
            (
                own,
                {"only": "layer."},
                "no weight has a name that `only` selects; got only='layer.'; fix: names are like embed.embedding",
            ),
            (own, {"only": [3]}, "`only` must be beginnings of names, or a function; got .3."),
            ({**own, "more": np.zeros(1)}, {}, "weight more is not a weight of the model"),
            ({key: leaf for key, leaf in files.items() if key != name}, {}, f"weight {name} is missing.*`only`"),
            ({**files, name: files[name][:-1]}, {}, "q_proj.weight has another shape"),
            (
                {key.removeprefix("model."): leaf for key, leaf in files.items()} | {bare: files[name][:-1]},
                {},
                f" {bare} has",
            ),
            ({"layers.0.qq": own["layers"][0]["q"]}, {"only": "layers."}, "layers.0.qq .did you mean 'layers.0.q'"),
            (
                own,
                {"names": {"layers.*.q": "layers.*.p", "blocks.*.k": "layers.*.k"}},
                "'blocks.*.k', which is like no name",
            ),
            ({**files, name.replace("q_proj", "x_proj"): files[name]}, {}, "did you mean 'model.layers.0.self_attn."),
            ({**files, name: 3.0}, {}, "q_proj.weight is not an array; got float"),
            (
                files,
                {"names": {"model.layers.*": "layers.0"}},
                "the two sides of an entry of `names` have different numbers of",
            ),
            (files, {"names": {name: "model.norm.weight"}}, "two weights have the same name"),
            ({"layers.0.q": own["layers"][0]["q"], ("layers", 0, "q"): own["layers"][0]["q"]}, {}, "same name"),
        ]
        for weights, options, words in cases:
            with pytest.raises(ModelError, match=words):
                llm.update_weights(weights, **options)
        assert equal(served(llm), first)
        assert llm.weights_version == 0
        llm.sleep(2, discard=True)
        with pytest.raises(RequestError, match="only needs weights that are loaded"):
            llm.update_weights(own, only="layers", mode="keep")
        llm.wake(files)
        assert equal(served(llm), first)


@pytest.mark.slow
def test_a_part_of_a_model_of_ones_own_with_one_array_for_both_ends() -> None:
    from own_model import OwnModel, make  # pyright: ignore[reportMissingImports]

    model, (_, layers, head) = make()
    table = head["kernel"].T
    params = Params({"embedding": table}, layers, {**head, "kernel": table})

    class Tied(OwnModel):
        def head(self, params: Any, x: jax.Array) -> jax.Array:
            return x @ params["kernel"].T + params["bias"]

    tied = Tied.__new__(Tied)
    tied.__dict__ = model.__dict__
    with LLM(tied, params=params, max_num_seqs=2, max_num_batched_tokens=8) as llm:
        first = written(llm)
        for weights in ({"embed.embedding": table[::-1]}, {"head": {"kernel": table}}):
            llm.update_weights(weights, only=("embed", "head"))
            now = llm.params
            assert np.array_equal(now.embed["embedding"], now.head["kernel"])
            written(llm)
        assert written(llm) == first
        llm.update_weights({"layers": {1: layers[1]}}, only="layers")
        assert written(llm) == first
        assert not jax.tree.leaves(table)[0].is_deleted()
