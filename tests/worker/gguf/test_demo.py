"""The real demo model, converted and asked."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs
from safetensors import safe_open
from support.demo import demo_directory, demo_gguf
from tokenizers import Tokenizer

pytestmark = [pytest.mark.demo, pytest.mark.slow]


def test_the_demo_model_knows_the_capital_of_france() -> None:
    """Greedy decoding in float32 says "The capital of France is Paris." and stops by itself."""
    directory = demo_directory("float32")
    config = json.loads((directory / "config.json").read_text())
    model = Model(ModelArgs.from_dict(config))
    model.load_weights(str(directory / "model.safetensors"), strict=True)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    prompt = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    cache = make_prompt_cache(model)
    logits = model(mx.array([tokenizer.encode(prompt).ids]), cache)
    said: list[int] = []
    while len(said) < 16:
        said.append(int(mx.argmax(logits[0, -1]).item()))
        if said[-1] == config["eos_token_id"]:
            break
        logits = model(mx.array([said[-1:]]), cache)
    assert tokenizer.decode(said[:-1]) == "The capital of France is Paris."
    assert said[-1] == config["eos_token_id"]


def test_the_demo_models_weights_are_the_files(tmp_path: Path) -> None:
    """A plain tensor, the embedding and a rotated one equal what the reference reader gives, bit for bit."""
    reader = {tensor.name: tensor for tensor in GGUFReader(demo_gguf()).tensors}
    with safe_open(demo_directory("float32") / "model.safetensors", "np") as file:
        for theirs, ours in (
            ("token_embd.weight", "model.embed_tokens.weight"),
            ("blk.7.ffn_down.weight", "model.layers.7.mlp.down_proj.weight"),
        ):
            wanted = dequantize(reader[theirs].data, reader[theirs].tensor_type)
            np.testing.assert_array_equal(file.get_tensor(ours), wanted)
        key = dequantize(reader["blk.7.attn_k.weight"].data, reader["blk.7.attn_k.weight"].tensor_type)
        found = file.get_tensor("model.layers.7.self_attn.k_proj.weight")
        np.testing.assert_array_equal(found[:32], key[0:64:2])
        np.testing.assert_array_equal(found[32:64], key[1:64:2])
