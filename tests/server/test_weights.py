"""Trainers pause the server and replace its weights; without token or folder, or with other weights, they are refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

import onedraw
import onedraw.backends.torch.remote.weights as remote_weights
from onedraw.build.llm import build_llm
from onedraw.contract.record import RecordingLLM, RecordWriter, read_records
from onedraw.engine.checkpoint_offload import CheckpointOffload
from onedraw.errors import BadParameter, BadRequest
from onedraw.llm.llm import LLM
from onedraw.server.config import ServerOptions
from onedraw.settings import Settings
from tests.server.running import Served, serving, wait_until
from tests.support import tiny

TOKEN = "only for the trainer"
HEADERS = {"authorization": f"Bearer {TOKEN}"}
BODY: dict[str, Any] = {"prompt": list(range(3, 80)), "max_tokens": 12, "seed": 5, "return_checksums": True, "ignore_eos": True}


def opened(folder: Path, **settings: Any) -> LLM:
    return build_llm(Settings(model=str(folder), max_context=256, dtype="f32", draft=("ngram",), **settings))


@dataclass(frozen=True)
class Trained:
    served: Served
    root: Path
    old: Path
    new: Path

    def update(self, **body: Any) -> httpx.Response:
        return self.served.http.post("/update_weights", json=body, headers=HEADERS)

    def act(self, path: str) -> httpx.Response:
        return self.served.http.post(path, headers=HEADERS)

    def answer(self) -> dict[str, Any]:
        return reply_of(self.served)


def reply_of(served: Served) -> dict[str, Any]:
    reply = served.post("/v1/completions", **BODY)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    (choice,) = found["choices"]
    return {"checksums": choice["score_checksums"], "text": choice["text"], "fingerprint": found["system_fingerprint"]}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A folder with the weights `old` and `new`, and the answers of servers that were started from them."""
    root = tmp_path_factory.mktemp("weights")
    answers = []
    for seed, name in enumerate(("old", "new")):
        with opened(tiny.write_safetensors("qwen3", root / name, seed=seed)) as llm, serving(llm) as served:
            answers.append(reply_of(served))
    assert answers[0]["checksums"] != answers[1]["checksums"]
    assert answers[0]["fingerprint"] != answers[1]["fingerprint"]
    return root, answers


@pytest.fixture
def trained(expected: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> Iterator[Trained]:
    root = expected[0]
    options = ServerOptions(update_token=TOKEN, weight_dir=root)
    settings = {"cache_budget": 1 << 26, "snapshot_dir": tmp_path / "snapshots"}
    with opened(root / "old", **settings) as llm, serving(llm, options) as served:
        yield Trained(served, root, root / "old", root / "new")


def test_after_an_update_the_server_is_one_that_was_started_with_the_new_weights(
    trained: Trained, expected: tuple[Path, list[dict[str, Any]]]
) -> None:
    old, new = expected[1]
    assert trained.answer() == trained.answer() == old  # the second time from the prefix cache
    for body, answer in (({"weight_dir": "new"}, new), ({"update_info": {"weight_dir": str(trained.old)}}, old)):
        found = trained.update(**body)
        assert found.status_code == 200, found.text
        assert found.json() == {"status": "updated", "fingerprint": answer["fingerprint"]}
        assert trained.answer() == trained.answer() == answer
        assert trained.served.get("/v1/models").json()["data"][0]["fingerprint"] == answer["fingerprint"]


def test_a_snapshot_of_the_old_weights_that_is_met_again_is_caught(
    trained: Trained, expected: tuple[Path, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the engine keeps the folder with the snapshots of the old weights."""
    # The counter of snapshots, which a thread writes, is published with the steps of a later answer.
    wait_until(lambda: bool(trained.answer()) and trained.served.llm.service.stats().snapshots_saved > 0)
    with monkeypatch.context() as planted:
        planted.setattr(CheckpointOffload, "change_folder", lambda self, folder: folder.close())
        trained.update(weight_dir="new")
        assert trained.answer()["checksums"] != expected[1][1]["checksums"]
        assert trained.served.llm.service.stats().snapshots_restored > 0
    trained.update(weight_dir="old")
    trained.update(weight_dir="new")
    assert trained.answer() == expected[1][1]


def test_weights_can_be_sent_as_a_body(trained: Trained, expected: tuple[Path, list[dict[str, Any]]]) -> None:
    data = (trained.new / "model.safetensors").read_bytes()
    headers = {**HEADERS, "content-type": "application/octet-stream"}
    found = trained.served.http.post("/update_weights", content=data, headers=headers)
    assert found.status_code == 200, found.text
    assert trained.answer()["checksums"] == expected[1][1]["checksums"]
    assert not list(trained.root.glob(".upload*"))
    for bad, status, code in ((data[:-4], 400, "corrupt_checkpoint"), (data + bytes(1 << 24), 413, "body_too_large")):
        refused = trained.served.http.post("/update_weights", content=bad, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
    assert trained.answer()["checksums"] == expected[1][1]["checksums"]


def test_a_trainer_on_the_same_machine_sends_tensors(
    trained: Trained, expected: tuple[Path, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    new = expected[1][1]
    tensors = load_file(trained.new / "model.safetensors")
    monkeypatch.setattr(remote_weights, "SECONDS", 5.0)
    assert onedraw.send_weights(trained.served.url, tensors.items(), token=TOKEN) == new["fingerprint"]
    assert trained.answer() == new
    with pytest.raises(BadRequest, match="invalid_update_token"):
        onedraw.send_weights(trained.served.url, tensors.items(), token="wrong")
    for bad, says in (
        ({**tensors, WEIGHT: torch.zeros(64, 96)}, "shape"),
        ({**tensors, "large": torch.zeros(1 << 23)}, "in use at most"),
    ):
        with pytest.raises(BadRequest, match=says):
            onedraw.send_weights(trained.served.url, bad.items(), token=TOKEN)
    with pytest.raises(BadParameter, match="int64"):
        onedraw.send_weights(trained.served.url, [("ids", torch.arange(3))], token=TOKEN)
    monkeypatch.setattr(remote_weights, "SECONDS", 0.2)
    refused = trained.update(port=9)  # nobody listens there
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "weights_not_sent")
    assert trained.answer() == new
    trained.update(weight_dir="old")


def changed(trained: Trained, name: str, change: Any) -> str:
    target = trained.root / name
    target.mkdir(exist_ok=True)
    config = json.loads((trained.new / "config.json").read_text())
    tensors = load_file(trained.new / "model.safetensors")
    change(config, tensors)
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return name


WEIGHT = "model.layers.0.mlp.down_proj.weight"
WRONG = {
    "shape": (lambda config, tensors: tensors.update({WEIGHT: torch.zeros(64, 96)}), "corrupt_checkpoint", "shape"),
    "missing": (lambda config, tensors: tensors.pop(WEIGHT), "corrupt_checkpoint", "missing"),
    "dtype": (lambda config, tensors: tensors.update({WEIGHT: tensors[WEIGHT].bfloat16()}), "other_dtype", "BF16"),
    "extra": (lambda config, tensors: tensors.update(other=torch.zeros(3)), "unsupported_model", "other"),
    "model": (lambda config, tensors: config.update(rms_norm_eps=0.5), "other_model", "config.json"),
    "nan": (lambda config, tensors: tensors[WEIGHT].fill_(torch.nan), "weights_refused", "finite"),
}


def test_other_weights_are_refused_by_name_and_the_old_ones_stay(
    trained: Trained, expected: tuple[Path, list[dict[str, Any]]]
) -> None:
    for name, (change, code, says) in WRONG.items():
        refused = trained.update(weight_dir=changed(trained, name, change))
        assert refused.status_code == 400, (name, refused.text)
        error = refused.json()["error"]
        assert error["code"] == code, error
        assert says in error["message"]
    assert trained.answer() == expected[1][0]


def test_only_folders_below_the_allowed_one_are_read(trained: Trained, tmp_path: Path) -> None:
    outside = tiny.write_safetensors("qwen3", tmp_path / "outside", seed=1)
    (trained.root / "link").symlink_to(outside)
    for name in (str(outside), "../outside", "link", "nothing", "new/model.safetensors", "\0", "a" * 5000):
        refused = trained.update(weight_dir=name)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == "weight_dir"
    (trained.root / "link").unlink()


def test_nothing_is_changed_without_the_token(trained: Trained) -> None:
    http = trained.served.http
    for headers in ({}, {"authorization": "Bearer wrong"}, {"x-update-token": "wrong"}, {"authorization": "Basic !"}):
        for path in ("/pause", "/resume", "/update_weights", "/start_weight_update", "/init_weight_transfer_engine"):
            refused = http.post(path, json={"weight_dir": "new"}, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_update_token")
    assert trained.served.get("/is_paused").json() == {"is_paused": False}
    assert http.post("/resume", auth=("trainer", TOKEN)).status_code == 200
    assert http.post("/resume", headers={"x-update-token": TOKEN}).status_code == 200


def test_a_server_without_a_token_refuses_by_name(fake: Served) -> None:
    for path in ("/pause", "/resume", "/update_weights"):
        refused = fake.post(path, weight_dir="x")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_update_token")


def test_requests_wait_while_the_server_is_paused_and_go_on_with_the_new_weights(
    trained: Trained, expected: tuple[Path, list[dict[str, Any]]]
) -> None:
    assert trained.act("/pause?mode=keep").json() == {"status": "paused"}
    assert trained.served.get("/is_paused").json() == {"is_paused": True}
    found: list[dict[str, Any]] = []
    waiting = threading.Thread(target=lambda: found.append(trained.answer()))
    waiting.start()
    wait_until(lambda: trained.served.llm.service.stats().waiting == 1)
    assert trained.update(weight_dir="new").status_code == 200
    assert not found
    assert trained.act("/resume").json() == {"status": "resumed"}
    waiting.join()
    assert found[0]["checksums"] == expected[1][1]["checksums"]


def test_a_pause_can_end_requests_as_moved(trained: Trained) -> None:
    trained.act("/pause")
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(trained.served.post("/v1/completions", **BODY).json()))
    waiting.start()
    wait_until(lambda: trained.served.llm.service.stats().waiting == 1)
    trained.act("/pause?mode=abort")
    waiting.join()
    assert found[0]["choices"][0]["finish_reason"] == "moved"
    assert trained.act("/pause?mode=wait").json()["error"]["param"] == "mode"
    trained.act("/resume")


def test_what_trainers_of_vllm_ask_is_answered(trained: Trained) -> None:
    config = trained.served.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert config["model_config"]["dtype"] == "torch.float32"
    assert config["model_config"]["max_model_len"] == trained.served.get("/v1/models").json()["data"][0]["max_model_len"] == 256
    assert trained.served.get("/get_world_size").json() == {"world_size": 1}
    for path in ("/start_weight_update", "/finish_weight_update"):
        assert trained.act(path).status_code == 200
    for refused in (trained.act("/init_weight_transfer_engine"), trained.update(update_info={"names": ["a"]})):
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "nccl_unsupported"
        assert "weight_dir" in refused.json()["error"]["message"]


# ---------------------------------------------------------------------------------------------- in this process


def test_tensors_of_a_trainer_are_loaded_in_process(expected: tuple[Path, list[dict[str, Any]]]) -> None:
    root, _ = expected
    options: dict[str, Any] = {"max_tokens": 8, "seed": 3, "checksums": True, "ignore_eos": True}
    prompt = tuple(range(5, 90))

    def checksums(llm: LLM) -> list[int | None]:
        reply = llm.generate(prompt, **options)
        assert not isinstance(reply, list)
        return [token.checksum for token in reply.tokens]

    with opened(root / "new") as llm:
        wanted, fingerprint = checksums(llm), llm.card.fingerprint
    tensors = load_file(root / "new" / "model.safetensors")
    with opened(root / "old") as llm:
        before = checksums(llm)
        card = llm.load_weights((name, torch.nn.Parameter(tensor)) for name, tensor in tensors.items())
        assert card.fingerprint != fingerprint or checksums(llm) == wanted
        assert checksums(llm) == wanted != before
        llm.load_weights((name, tensor.numpy()) for name, tensor in load_file(root / "old" / "model.safetensors").items())
        assert checksums(llm) == before


def test_a_reply_of_two_weights_is_not_recorded(expected: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    root, _ = expected
    with RecordingLLM(opened(root / "old"), RecordWriter(tmp_path / "records"), source="test") as llm:
        options: dict[str, Any] = {"max_tokens": 12, "seed": 3, "ignore_eos": True}
        pieces = llm.stream("The sea", **options)
        next(pieces)
        llm.service.pause()
        llm.update_weights(root / "new")
        llm.service.resume()
        list(pieces)
        llm.generate("The sea", **options)
        fingerprint = llm.card.fingerprint
    (record,) = read_records(tmp_path / "records")
    assert record.fingerprint == fingerprint
