"""Adapters of a server: named as models, listed, loaded and unloaded while it runs."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfercept.llm import LLM
from jinfercept.models.load import read_config
from tests.support.live_server import Running, running
from tests.support.peft_adapters import shapes_of, write_adapter
from tests.support.sample_tokenizers import VOCAB, byte_level
from tests.support.tiny_model import GOLDEN

NAME = "llama_gqa"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}<tool_call>{% endif %}"
OPERATOR, CLIENT = {"Authorization": "Bearer boss"}, {"Authorization": "Bearer somebody"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `--lora-dir`, in which there are two adapters."""
    folder = tmp_path_factory.mktemp("loras")
    for place, name in enumerate(("first", "second", "third")):
        write_adapter(folder / name, shapes_of(GOLDEN / NAME), rank=2, seed=place)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    config = replace(read_config(GOLDEN / NAME), vocab_size=VOCAB, eos_token_ids=())
    sizes: dict[str, Any] = {"page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, "kv_tokens": 512}
    sizes |= {"profile": "paper-gptj-6b-a100", "dtype": "float32", "max_loras": 3, "tool_lora": "sql"}
    loras = {"sql": folder / "first"}
    with LLM(config, load_format="dummy", tokenizer=byte_level(), loras=loras, **sizes) as llm:
        yield llm


@pytest.fixture
def served(llm: LLM, folder: Path, tmp_path: Path) -> Iterator[Running]:
    template = tmp_path / "plain.jinja"
    template.write_text(TEMPLATE)
    with running(llm, lora_dir=str(folder), chat_template=str(template), tool_call_parser="hermes") as server:
        yield server
        server.wait_idle()
        for name in {*llm.loras} - {"sql"}:
            llm.unload_lora(name)


def answer(served: Running, model: str, **fields: Any) -> str:
    reply = served.chat(model=model, **fields)
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == model
    message = reply.json()["choices"][0]["message"]
    return message["content"] or ""


def load(served: Running, name: str, path: str, **more: Any) -> Any:
    return served.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})


def test_the_name_of_an_adapter_is_a_model(served: Running, folder: Path) -> None:
    texts = [answer(served, name) for name in ("scripted", "sql")]
    assert texts[0] != texts[1]
    completions = [
        served.client.completions.create(model=name, prompt="Hi", temperature=0, max_tokens=8).choices[0].text
        for name in ("scripted", "sql")
    ]
    assert completions == texts
    messages = {"model": "sql", "max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": "Hi"}]}
    reply = served.http.post("/v1/messages", json=messages)
    assert (reply.json()["model"], reply.json()["content"][0]["text"]) == ("sql", texts[1])
    response = served.http.post(
        "/v1/responses", json={"model": "sql", "input": "Hi", "temperature": 0, "max_output_tokens": 8}
    )
    assert response.json()["output"][0]["content"][0]["text"] == texts[1]
    assert served.chat(model="sqll").status_code == 404
    assert "available: scripted, sql" in served.chat(model="sqll").json()["error"]["message"]


def test_models_list_the_adapters_with_their_parent(served: Running, folder: Path) -> None:
    cards = served.http.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"], card["root"]) for card in cards] == [
        ("scripted", None, "tiny"),
        ("sql", "scripted", "first"),
    ]
    assert served.http.get("/v1/models/sql").json() == cards[1]
    page = served.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert [model["id"] for model in page["data"]] == ["scripted", "sql"]


def test_adapters_are_loaded_and_unloaded_while_the_server_runs(served: Running, folder: Path) -> None:
    base = answer(served, "scripted")
    reply = load(served, "new", "second")
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    first = answer(served, "new")
    assert first not in (base, answer(served, "sql"))
    again = load(served, "new", "third")
    assert (again.status_code, "has this name" in again.json()["error"]["message"]) == (400, True)
    assert load(served, "new", str(folder / "third"), load_inplace=True).status_code == 200
    assert answer(served, "new") not in (first, base)
    assert load(served, "scripted", "third").status_code == 400
    unloaded, again = (served.http.post("/v1/unload_lora_adapter", json={"lora_name": "new"}) for _ in range(2))
    assert unloaded.text == "Success: LoRA adapter 'new' removed successfully."
    assert again.status_code == 404
    assert served.chat(model="new").status_code == 404
    assert answer(served, "scripted") == base


@pytest.mark.parametrize("path", ["..", "../loras", "/", "/etc", "nowhere", "linked", "links within", "first\0"])
def test_a_path_outside_the_folder_is_refused_and_tells_nothing(served: Running, folder: Path, path: str) -> None:
    outside = write_adapter(folder.parent / "outside", shapes_of(GOLDEN / NAME), rank=2)
    if not (folder / "linked").is_symlink():
        (folder / "linked").symlink_to(outside)
        (folder / "links within").mkdir()
        for file in outside.iterdir():
            (folder / "links within" / file.name).symlink_to(file)
    reply = load(served, "other", path)
    message = "the path must be a directory inside the server's --lora-dir"
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, message)


def test_what_cannot_be_loaded_is_said(served: Running, folder: Path) -> None:
    write_adapter(folder / "dora", shapes_of(GOLDEN / NAME), rank=2, use_dora=True)
    reply = load(served, "dora", "dora")
    assert reply.status_code == 400
    assert "use_dora=True" in reply.json()["error"]["message"]
    assert load(served, "", "first").status_code == 400
    assert [load(served, name, "second").status_code for name in ("x", "y", "z")] == [200, 200, 400]


def test_an_adapter_whose_numbers_overflow_fails_its_own_requests_by_name(served: Running, folder: Path) -> None:
    file = write_adapter(folder / "giant", shapes_of(GOLDEN / NAME), rank=2) / "adapter_model.safetensors"
    save_file(
        {name: np.full_like(tensor, 3e38 if "A" in name else 1.0) for name, tensor in load_file(file).items()}, file
    )
    expected = answer(served, "sql")
    assert load(served, "giant", "giant").status_code == 200
    reply = served.chat(model="giant")
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "engine_error")
    assert "logits with the adapter 'giant' are NaN or infinite" in reply.json()["error"]["message"]
    assert answer(served, "sql") == expected


def test_only_operators_load_where_there_are_keys(llm: LLM, folder: Path) -> None:
    with running(llm, lora_dir=str(folder), api_key=("somebody",), operator_key=("boss",)) as server:
        body = {"lora_name": "x", "lora_path": "second"}
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            statuses = [
                server.http.post(path, json=body, headers=headers).status_code
                for headers in ({"Authorization": "Bearer wrong"}, CLIENT, OPERATOR)
            ]
            assert statuses == [401, 403, 200]


def test_without_the_folder_nobody_loads(llm: LLM) -> None:
    with running(llm) as server:
        assert load(server, "x", "second").status_code == 404
        assert "/v1/load_lora_adapter" not in server.http.get("/openapi.json").json()["paths"]
