"""TRL's AsyncGRPOTrainer with its rollout worker and its client, unmodified, against a server: the program of `.venv-trl`.

Arguments: the folder of the model, the server's address, the folder of its weights, the file for what was found. What TRL needs a
GPU for is given here: the attention kernel that it takes from the hub (in plain torch), the name of the GPU for a gauge, and the
transfer of weights over NCCL (a file below the server's `--weight-dir`). Its rollout worker wants vLLM to be installed and uses
nothing of it: the folder `vllm` beside this file has the names that TRL imports.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from datasets import Dataset
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing
from trl.experimental.async_grpo.vllm_client import VLLMClient

STEPS, REPLIES, LENGTH = 12, 16, 8


def even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of even token ids in each reply."""
    return [sum(token % 2 == 0 for token in reply) / len(reply) for reply in completion_ids]


def varlen_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    _longest_query: int,
    _longest_key: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    """Attention of each segment's queries ([T, heads, dim]) over its own keys, whose end they are."""
    assert causal
    assert window_size == (-1, -1)
    share = queries.shape[1] // keys.shape[1]
    found = []
    for segment in range(len(query_starts) - 1):
        q = queries[query_starts[segment] : query_starts[segment + 1]].transpose(0, 1)
        k, v = (
            one[key_starts[segment] : key_starts[segment + 1]].transpose(0, 1).repeat_interleave(share, 0)
            for one in (keys, values)
        )
        hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(k.shape[1] - q.shape[1] + 1)
        scores = (q @ k.transpose(1, 2) * softmax_scale).masked_fill(hidden, -torch.inf)
        found.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(found)


class FolderTransfer:
    """Sends weights as a safetensors file in a folder of the server's, with TRL's own calls around it."""

    def __init__(self, client: VLLMClient, folder: Path, source: Path) -> None:
        self._client, self._folder, self._source, self._sent = client, folder, source, 0

    def init_weight_transfer(self) -> None:
        self._client.wait_for_server_ready()
        assert self._client.get_dtype() == "torch.float32"
        assert self._client.get_world_size() == 1

    def pause(self) -> None:
        self._client.pause()

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        self._sent += 1
        folder = self._folder / f"step-{self._sent}"
        folder.mkdir()
        (folder / "config.json").write_text((self._source / "config.json").read_text())
        save_file(
            {name: tensor.contiguous() for name, tensor in iterator}, folder / "model.safetensors", metadata={"format": "pt"}
        )
        self._client.start_weight_update()
        self._client.update_weights({"weight_dir": folder.name})
        self._client.finish_weight_update()

    def resume(self) -> None:
        self._client.resume()

    def destroy(self) -> None:
        pass


def main(model: str, url: str, weights: str, answer: str) -> None:
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: 1e12  # it asks for the name of the GPU
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    config = AsyncGRPOConfig(
        output_dir=str(Path(answer).parent / "trl"),
        use_cpu=True,
        bf16=False,
        dtype="float32",
        seed=1,
        max_steps=STEPS,
        learning_rate=2e-3,
        per_device_train_batch_size=REPLIES,
        gradient_accumulation_steps=1,
        num_generations=REPLIES,
        max_completion_length=LENGTH,
        max_staleness=1,
        token_budget=-1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        gradient_checkpointing=False,
        vllm_server_base_url=url,
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()  # TRL must know it
    trainer = AsyncGRPOTrainer(
        model=model,
        reward_funcs=even_tokens,
        args=config,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "Hello"}]] * 4}),
        weight_transfer=FolderTransfer(VLLMClient(url), Path(weights), Path(model)),
    )
    trainer.train()
    Path(answer).write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main(*sys.argv[1:])
