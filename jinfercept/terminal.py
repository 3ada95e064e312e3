"""What the commands `run` and `info` show: streamed text, a chat, a model's facts."""

import jax
from rich.console import Console
from rich.table import Table

from jinfercept.errors import RequestError
from jinfercept.llm import LLM
from jinfercept.models.config import ModelConfig
from jinfercept.models.model import kv_bytes_per_token, param_bytes
from jinfercept.request import Event, Finished, RequestOutput, Resumed, SamplingParams, Token


def complete(llm: LLM, prompt: str, params: SamplingParams) -> RequestOutput:
    """Write the prompt's continuation to standard output as it comes."""
    [output] = llm.generate(prompt, params, on_event=_show)
    print(flush=True)
    return output


def chat(llm: LLM, params: SamplingParams) -> None:
    """A chat on standard input; an empty line or the end of the input ends it."""
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise RequestError("this model has no chat template", got="a chat", fix="complete a text with --prompt")
    messages: list[dict[str, str]] = []
    console = Console(stderr=True)
    console.print("[dim]an empty line ends the chat[/dim]")
    while line := _ask():
        messages.append({"role": "user", "content": line})
        prompt = llm.tokenizer.apply_chat_template(messages)
        ids = llm.tokenizer.encode(prompt)
        try:
            [output] = llm.generate({"prompt_token_ids": ids}, params, on_event=_show)
        except KeyboardInterrupt:  # the answer stops, the chat goes on
            print(flush=True)
            messages.pop()
            continue
        print(flush=True)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        console.print(
            f"[dim]{output.outputs[0].num_generated} tokens, {output.num_cached_tokens} of the prompt kept[/dim]"
        )


def describe(name: str, config: ModelConfig) -> None:
    """A model's shape and what it takes, without loading it."""
    table = Table(title=name, show_header=False)
    for row in (
        ("architecture", config.family),
        ("layers", config.num_layers),
        ("embedding", config.hidden_size),
        ("query heads × head dim", f"{config.num_heads} × {config.head_dim}"),
        ("KV heads", config.num_kv_heads),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("longest sequence", f"{config.max_position:,}"),
        ("rotary scaling", config.rope.scaling),
        ("devices", ", ".join(f"{device.platform} {device.id}" for device in jax.devices())),
    ):
        table.add_row(row[0], str(row[1]))
    for dtype in ("float32", "bfloat16"):
        weights, token = param_bytes(config, dtype), kv_bytes_per_token(config, dtype)
        table.add_row(dtype, f"weights {weights / 2**30:.2f} GiB, KV {token / 2**10:.0f} KiB per token")
    Console().print(table)


def _show(event: Event) -> None:
    if isinstance(event, Token | Resumed | Finished) and event.text:
        print(event.text, end="", flush=True)


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""
