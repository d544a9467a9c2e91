"""A tiny checkpoint that calls one tool and then answers: a real model whose weights are a script.

In: the name and arguments of a call, and an answer. Out: a transformers folder with a context of 64K and a chat template with
tools. Attention and MLP are zero, so each token follows from the token before it alone: the head's row of a token points at the
embedding of the token that precedes it in the script. `python -m tests.support.scripted FOLDER NAME ARGUMENTS ANSWER` writes it.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONTEXT = 65536
HIDDEN = 64
CALL, ANSWER = "<|call|>", "<|answer|>"  # the last token of a prompt without, and with, the result of a tool
TEMPLATE = """{%- set results = namespace(seen=false) -%}
{%- if tools -%}<|im_start|>system
To call a tool, write <tool_call>{"name": ..., "arguments": ...}</tool_call>. The tools are:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' %}{% set results.seen = true %}{% endif -%}
<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant{{ '<|answer|>' if results.seen or not tools else '<|call|>' }}{% endif -%}"""


def write_scripted(folder: Path, *, name: str, arguments: str, answer: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    call = ["<tool_call>", f'\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n', "</tool_call>"]
    made = _tokenizer()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (CALL, ANSWER)])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in (*call, answer)])
    made.save(str(folder / "tokenizer.json"))
    ids = {text: made.token_to_id(text) for text in (*SPECIAL, CALL, ANSWER, *call, answer)}
    vocab, end = made.get_vocab_size(), ids[SPECIAL[2]]
    tensors = _tensors(vocab, [[ids[CALL], *(ids[text] for text in call), end], [ids[ANSWER], ids[answer], end]])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(vocab, end)))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    texts = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **texts}))
    return folder


def _tokenizer() -> Tokenizer:
    """Large enough that an agent's first prompt has some 30,000 tokens, learned from two modules of the standard library."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4096, special_tokens=[*SPECIAL], show_progress=False, initial_alphabet=alphabet)
    made.train_from_iterator([inspect.getsource(argparse), inspect.getsource(subprocess)], trainer)
    return made


def _config(vocab: int, end: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": end,
        "torch_dtype": "float32",
    }


def _tensors(vocab: int, chains: list[list[int]]) -> dict[str, np.ndarray]:
    """Every token's embedding is a random vector of signs; the next token of a chain has a logit of 256, all others far less."""
    embedding = np.random.default_rng(0).choice(np.float32([-1, 1]), (vocab, HIDDEN))
    head = np.zeros((vocab, HIDDEN), np.float32)
    for chain in chains:
        for before, after in itertools.pairwise(chain):
            head[after] += 4 * embedding[before]
    one, layer = np.ones(HIDDEN, np.float32), "model.layers.0"
    zeros = {
        **{f"{layer}.self_attn.{part}_proj.weight": (HIDDEN, HIDDEN) for part in "qo"},
        **{f"{layer}.self_attn.{part}_proj.weight": (HIDDEN // 2, HIDDEN) for part in "kv"},
        **{f"{layer}.mlp.{part}_proj.weight": (HIDDEN, HIDDEN) for part in ("gate", "up", "down")},
    }
    return {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": one,
        f"{layer}.input_layernorm.weight": one.copy(),
        f"{layer}.post_attention_layernorm.weight": one.copy(),
        **{name: np.zeros(shape, np.float32) for name, shape in zeros.items()},
    }


if __name__ == "__main__":
    folder, name, arguments, answer = sys.argv[1:]
    write_scripted(Path(folder), name=name, arguments=arguments, answer=answer)
