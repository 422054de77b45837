"""Writes tiny llama GGUF files with random weights and a small vocabulary, for tests."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

Q = GGMLQuantizationType
HIDDEN, LAYERS, HEADS, KV_HEADS, FEED_FORWARD = 64, 2, 4, 2, 96
HEAD_DIM = HIDDEN // HEADS
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
TEXT = """The capital of France is Paris. A server accepts a request, puts it in a queue and answers.
def main(): return 0  # numbers: 42, 1984, 3.14; it's, don't, we'll. Café naïve 你好 😀 the the the
"""

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def tiny_bpe() -> Tokenizer:
    """A byte-level BPE tokenizer cut like SmolLM2's (single digits), about 400 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return tokenizer


def bpe_metadata(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer keys of a GGUF for `tokenizer`."""
    import json

    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


@dataclass
class TinyLlama:
    """What to write; `write` returns the weights that a correct conversion gives.

    `metadata` overrides or adds keys, None removes one; `tensors` overrides or adds tensors under their
    GGUF names, None removes one.
    """

    kind: GGMLQuantizationType = Q.F32
    hidden: int = HIDDEN
    layers: int = LAYERS
    seed: int = 0
    tied: bool = True
    biases: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, NDArray[np.float32] | None] = field(default_factory=dict)
    vocabulary: Mapping[str, Any] | None = None

    def write(self, path: Path) -> dict[str, NDArray[np.float32]]:
        vocabulary = dict(self.vocabulary or bpe_metadata(tiny_bpe()))
        keys: dict[str, Any] = {
            "llama.block_count": self.layers,
            "llama.context_length": 256,
            "llama.embedding_length": self.hidden,
            "llama.feed_forward_length": FEED_FORWARD if self.hidden == HIDDEN else self.hidden,
            "llama.attention.head_count": HEADS,
            "llama.attention.head_count_kv": KV_HEADS,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.freq_base": 10000.0,
            **vocabulary,
            **self.metadata,
        }
        writer = GGUFWriter(path, str(keys.pop("general.architecture", "llama")))
        for key, value in keys.items():
            if value is not None:
                add_key(writer, key, value)
        expected = {}
        for name, values in self._tensors(len(vocabulary["tokenizer.ggml.tokens"])).items():
            expected |= self._add_tensor(writer, name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return expected

    def _tensors(self, tokens: int) -> dict[str, NDArray[np.float32]]:
        hidden = self.hidden
        head_dim = hidden // HEADS
        forward = FEED_FORWARD if hidden == HIDDEN else hidden
        rows = {"attn_q": hidden, "attn_k": KV_HEADS * head_dim, "attn_v": KV_HEADS * head_dim}
        rows |= {"attn_output": hidden, "ffn_gate": forward, "ffn_up": forward, "ffn_down": hidden}
        shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (tokens, hidden)}
        for layer in range(self.layers):
            shapes[f"blk.{layer}.attn_norm.weight"] = shapes[f"blk.{layer}.ffn_norm.weight"] = (hidden,)
            for part, count in rows.items():
                shapes[f"blk.{layer}.{part}.weight"] = (count, forward if part == "ffn_down" else hidden)
            for part in self.biases:
                shapes[f"blk.{layer}.{part}.bias"] = (rows[part],)
        shapes["output_norm.weight"] = (hidden,)
        if not self.tied:
            shapes["output.weight"] = (tokens, hidden)
        rng = np.random.default_rng(self.seed)
        found = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        for name, values in self.tensors.items():
            if values is None:
                del found[name]
            else:
                found[name] = values
        return found

    def _add_tensor(
        self, writer: GGUFWriter, name: str, values: NDArray[np.float32]
    ) -> dict[str, NDArray[np.float32]]:
        head_dim = self.hidden // HEADS
        rotated = name.split(".")[2:3] and name.split(".")[2] in ("attn_q", "attn_k")
        stored = interleave(values, head_dim) if rotated else values
        if values.ndim == 1 or self.kind == Q.F32:
            writer.add_tensor(name, stored)
        else:
            packed = pack(stored, self.kind)
            writer.add_tensor(name, packed, raw_dtype=self.kind)
            stored = dequantize(packed, self.kind).reshape(values.shape)
            values = deinterleave(stored, head_dim) if rotated else stored
        return {hf_name(name): values}


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor."""
    outer = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in outer or not name.startswith("blk."):
        return outer.get(name, name)
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES.get(part, part)}.{suffix}"


def interleave(values: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """What llama.cpp's converter does to the rows of q and k: row i of the first half of a head and row i
    of the second half become neighbours."""
    out = np.empty_like(values)
    for head in range(0, len(values), head_dim):
        half = head_dim // 2
        out[head : head + head_dim : 2] = values[head : head + half]
        out[head + 1 : head + head_dim : 2] = values[head + half : head + head_dim]
    return out


def deinterleave(values: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Undoes `interleave`."""
    out = np.empty_like(values)
    for head in range(0, len(values), head_dim):
        half = head_dim // 2
        out[head : head + half] = values[head : head + head_dim : 2]
        out[head + half : head + head_dim] = values[head + 1 : head + head_dim : 2]
    return out


# Where a block of these keeps its float16 scales; gguf can read but not write them.
_SCALES_AT = {Q.Q2_K: (80, 82), Q.Q3_K: (108,), Q.Q4_K: (0, 2), Q.Q5_K: (0, 2), Q.Q6_K: (208,)}


def pack(values: NDArray[np.float32], kind: GGMLQuantizationType) -> NDArray[np.uint8]:
    """`values` quantised; random blocks with small scales for the kinds that gguf cannot write."""
    from gguf.constants import GGML_QUANT_SIZES

    if kind not in _SCALES_AT:
        packed: NDArray[np.uint8] = np.ascontiguousarray(quantize(values, kind)).view(np.uint8)
        return packed
    block, size = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (values.size // block, size), np.uint8)
    for at in _SCALES_AT[kind]:
        scale = rng.uniform(0.001, 0.01, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(values.shape[0], -1)


def add_key(writer: GGUFWriter, key: str, value: Any) -> None:
    """Add a metadata key of the type that `value` has."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
