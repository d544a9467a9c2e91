"""Reads a model configuration key by key, with types, and refuses keys that were not read.

In: config.json or the metadata of a GGUF file. Out: typed values. A missing key or a wrong type raises CorruptFile; an unknown
key that may change the computation raises UnsupportedModel. Null counts as absent.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from onedraw.errors import CorruptFile, UnsupportedModel

SLIDING, FULL = "sliding_attention", "full_attention"  # layer types in config.json
# Keys of config.json that do not affect the forward pass.
IGNORED_KEYS = frozenset(
    {
        "architectures",
        "model_type",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "_name_or_path",
        "name_or_path",
        "use_cache",
        "return_dict",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "unk_token_id",
        "decoder_start_token_id",
        "cls_token_id",
        "mask_token_id",
        "initializer_range",
        "attention_dropout",
        "hidden_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "classifier_dropout",
        "pretraining_tp",
        "output_attentions",
        "output_hidden_states",
        "torchscript",
        "use_bfloat16",
        "tf_legacy_loss",
        "chunk_size_feed_forward",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "task_specific_params",
        "tokenizer_class",
        "prefix",
        "finetuning_task",
        "is_decoder",
        "gradient_checkpointing",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_flash_attn_2_enabled",
        "experts_implementation",
        "unsloth_fixed",
        "unsloth_version",
        "transformers.js_config",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "output_scores",
        "return_dict_in_generate",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "_commit_hash",
        "_from_model_config",
        "model_max_length",
        "max_sequence_length",
        "is_llama_config",
        "neftune_noise_alpha",
    }
)

# Keys of mixture-of-experts configs about training or reported outputs.
IGNORED_MOE_KEYS = frozenset({"router_aux_loss_coef", "output_router_logits", "router_z_loss_coef", "router_jitter_noise"})

# Keys of multimodal configs outside text_config. Images, video and audio are not supported.
IGNORED_MULTIMODAL_KEYS = frozenset(
    {
        "vision_config",
        "audio_config",
        "image_token_id",
        "image_token_index",
        "video_token_id",
        "audio_token_id",
        "audio_token_index",
        "vision_start_token_id",
        "vision_end_token_id",
        "boi_token_id",
        "boi_token_index",
        "eoi_token_id",
        "eoi_token_index",
        "boa_token_id",
        "boa_token_index",
        "eoa_token_id",
        "eoa_token_index",
        "vision_soft_tokens_per_image",
        "mm_tokens_per_image",
        "audio_soft_tokens_per_image",
        "mtp_num_hidden_layers",
        "unsloth_fixed_mtp",
        "auto_map",
    }
)

MAX_INTEGER = 2**31 - 1
MAX_LAYERS = 4096


def default_head_dim(hidden: int, heads: int, origin: str) -> int:
    """The head size if the configuration does not name one."""
    if hidden < heads:
        raise CorruptFile(f"{origin}: the head size is missing, and hidden size {hidden} is less than {heads} heads")
    return hidden // heads


def _is_off(value: Any) -> bool:
    """Null, false, zero and empty values enable nothing."""
    return value is None or value is False or (not isinstance(value, bool) and value in (0, "", [], {}))


class ConfigReader:
    """One configuration being read; it records which keys were read. Owner: the function that reads it."""

    def __init__(self, values: Mapping[str, Any], *, origin: str, prefix: str = "") -> None:
        self._values = values
        self._origin = origin
        self._prefix = prefix  # what GGUF keys begin with, such as "llama."
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        self._read.add(self._prefix + name)
        return self._values.get(self._prefix + name)

    def has(self, name: str) -> bool:
        """Whether the key is present, even with the value null."""
        return self._prefix + name in self._values

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = MAX_INTEGER) -> int:
        """A whole number; without a default the key is required."""
        value = self.optional_integer(name, least=least, most=most)
        if value is None:
            value = default
        if value is None:
            raise CorruptFile(f"{self._origin}: {self._prefix}{name} is missing")
        return value

    def optional_integer(self, name: str, *, least: int = 1, most: int = MAX_INTEGER) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise CorruptFile(
                f"{self._origin}: {self._prefix}{name} must be a whole number from {least} to {most}, not {value!r}"
            )
        return value

    def integers(self, name: str, count: int, default: list[int] | None = None) -> list[int]:
        """One positive whole number per layer, from a list or from one number for all layers."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, list):
            return [self.integer(name)] * count
        if len(value) != count or not all(isinstance(item, int) and item > 0 for item in value):
            raise CorruptFile(f"{self._origin}: {self._prefix}{name} must be {count} positive whole numbers, not {value!r}")
        return value

    def flags(self, name: str, count: int, default: list[bool]) -> list[bool]:
        """One boolean per layer."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, list) or len(value) != count or not all(item in (0, 1) for item in value):
            raise CorruptFile(f"{self._origin}: {self._prefix}{name} must be a list of {count} booleans, not {value!r}")
        return [bool(item) for item in value]

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number; without a default the key is required."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            wrong = "is missing" if value is None else f"must be a positive number, not {value!r}"
            raise CorruptFile(f"{self._origin}: {self._prefix}{name} {wrong}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CorruptFile(f"{self._origin}: {self._prefix}{name} must be true or false, not {value!r}")
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise CorruptFile(f"{self._origin}: {self._prefix}{name} must be an object, not {value!r}")
        return value

    def expect(self, name: str, *accepted: Any) -> None:
        """Refuse the model unless the key is absent or has one of these values."""
        value = self.get(name)
        if value is not None and value not in accepted:
            listed = ", ".join(map(repr, accepted)) or "null"
            raise UnsupportedModel(f"{self._origin}: {self._prefix}{name} = {value!r} is not supported; supported: {listed}")

    def refuse_unknown(self, ignored: Collection[str] = ()) -> None:
        """Refuse the model if a key was not read, is not in `ignored`, and is not switched off."""
        for name, value in self._values.items():
            unread = name.startswith(self._prefix) and name not in self._read and name.removeprefix(self._prefix) not in ignored
            if unread and not _is_off(value):
                shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
                raise UnsupportedModel(f"{self._origin}: {name} = {shown} is not supported: its effect on the model is unknown")


def text_config_keys(config: Mapping[str, Any], *, origin: str) -> tuple[ConfigReader, bool | None]:
    """The keys of the text model, and tie_word_embeddings of an enclosing multimodal config (None if there is no such config).

    Multimodal configs nest the text model in text_config.
    """
    inner = config.get("text_config")
    if inner is None:
        return ConfigReader(config, origin=origin), None
    outer = ConfigReader(config, origin=origin)
    outer.mapping("text_config")
    refuse_quantized(outer, origin)
    tied = outer.flag("tie_word_embeddings") if outer.get("tie_word_embeddings") is not None else None
    outer.refuse_unknown(IGNORED_KEYS | IGNORED_MULTIMODAL_KEYS)
    return ConfigReader(inner, origin=f"{origin}: text_config"), tied


def layer_types(keys: ConfigReader, count: int, *, accepted: Collection[str], default: list[str], origin: str) -> list[str]:
    """The type of every layer, as listed in layer_types."""
    types = keys.get("layer_types")
    if types is None:
        return default
    if not isinstance(types, list) or len(types) != count:
        raise CorruptFile(f"{origin}: layer_types must list {count} layers")
    for kind in types:
        if kind not in accepted:
            raise UnsupportedModel(f"{origin}: layer_types: {kind!r} is not supported; supported: {', '.join(accepted)}")
    return types


def layer_windows(types: Sequence[str], window: int | None, origin: str) -> list[int | None]:
    """The attention window of every layer: `window` in layers of the type SLIDING, None in others."""
    if window is None and SLIDING in types:
        raise CorruptFile(f"{origin}: layer_types has sliding_attention layers, but no sliding_window is set")
    return [window if kind == SLIDING else None for kind in types]


def code_notes(keys: ConfigReader) -> tuple[str, ...]:
    return ("auto_map: code that comes with a checkpoint is never run",) if keys.get("auto_map") else ()


def refuse_quantized(keys: ConfigReader, origin: str) -> None:
    if keys.get("quantization_config") is not None:
        raise UnsupportedModel(f"{origin}: quantization_config: quantized safetensors are not supported; use a GGUF file")
