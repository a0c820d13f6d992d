"""What is measured: a model, sessions of two turns, and the engine's arguments.

The model is Llama's architecture with random weights, as large as it must be for prefill to cost something on a CPU.
All its heads have keys and values of their own, so a block of 128 tokens is 1 MiB, and loads are not for free either.
"""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 128
ANSWER_TOKENS = 16
"""Generated in the first turn."""
NEW_TOKENS = 80
"""What the second turn adds to the first one and its answer."""
CHECKED_TOKENS = 8
"""Generated in the second turn, and compared."""
MAX_BATCHED_TOKENS = 2048
VOCABULARY = 2048
LAYERS, HIDDEN, HEADS, HEAD_SIZE, INTERMEDIATE = 2, 512, 8, 64, 1024
KV_BYTES_PER_TOKEN = LAYERS * 2 * HEADS * HEAD_SIZE * 4
_GAIN = 1.5
_POOL_FACTOR = 5
"""The engine's blocks, in longest sessions: saves may hold a quarter of them, and two turns overlap."""

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_SIZE,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1 << 17,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _shapes() -> dict[str, tuple[int, ...]]:
    """The names and shapes of the weights, as transformers writes them."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    width = HEADS * HEAD_SIZE
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name in ("q", "k", "v"):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (width, HIDDEN)
        shapes[f"{at}self_attn.o_proj.weight"] = (HIDDEN, width)
        for name in ("gate", "up"):
            shapes[f"{at}mlp.{name}_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[f"{at}mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
        for name in ("input", "post_attention"):
            shapes[f"{at}{name}_layernorm.weight"] = (HIDDEN,)
    return shapes


def write_model(directory: Path) -> None:
    """Makes the model directory: config.json and weights that make every token depend on the whole context.

    Needs safetensors, which vLLM's environment has.
    """
    import numpy as np
    from safetensors.numpy import save_file

    tensors = {}
    for name, shape in _shapes().items():
        generator = np.random.default_rng(zlib.crc32(name.encode()))
        if len(shape) == 1:
            tensors[name] = generator.uniform(0.75, 1.25, shape).astype(np.float32)
        else:
            tensors[name] = generator.standard_normal(shape, np.float32) * np.float32(_GAIN / shape[1] ** 0.5)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=1))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def engine_arguments(longest_tokens: int) -> dict[str, Any]:
    """LLM's arguments for sessions of at most so many tokens in the first turn."""
    limit = longest_tokens + 2 * BLOCK_TOKENS
    return {
        "skip_tokenizer_init": True,
        "load_format": "safetensors",
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "max_model_len": limit,
        "max_num_batched_tokens": MAX_BATCHED_TOKENS,
        "max_num_seqs": 4,
        "num_gpu_blocks_override": _POOL_FACTOR * (limit // BLOCK_TOKENS),
        "seed": 0,
        "disable_log_stats": False,
    }


@dataclass(frozen=True, slots=True)
class Session:
    """The first turn of a conversation, and what its user says then."""

    tokens: int
    number: int

    @property
    def first(self) -> list[int]:
        """The first turn's prompt."""
        return self._random("first", self.tokens)

    def second(self, answer: list[int]) -> list[int]:
        """The second turn's prompt.

        It and what is generated after it complete no block beyond the first turn's, so that nothing is saved by it
        and the same session can be measured again.
        """
        return [*self.first, *answer, *self._random("second", NEW_TOKENS)]

    def second_of_another(self, answer: list[int]) -> list[int]:
        """As the second turn, but for one block in the middle of the first one."""
        changed = self.second(answer)
        start = self.tokens // 2 // BLOCK_TOKENS * BLOCK_TOKENS
        changed[start : start + BLOCK_TOKENS] = self._random("other", BLOCK_TOKENS)
        return changed

    def _random(self, what: str, count: int) -> list[int]:
        words = random.Random(f"{what}/{self.tokens}/{self.number}")
        return [words.randrange(3, VOCABULARY) for _ in range(count)]


def expected_hit(tokens: int) -> int:
    """Tokens of the second turn that a cache of whole blocks can give."""
    return (tokens + ANSWER_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def check_lengths(lengths: list[int]) -> None:
    """ValueError for first turns after which a second one would complete a block."""
    for tokens in lengths:
        if tokens < BLOCK_TOKENS or tokens % BLOCK_TOKENS:
            raise ValueError(f"{tokens} tokens: give multiples of the block, {BLOCK_TOKENS}")


assert ANSWER_TOKENS + NEW_TOKENS + CHECKED_TOKENS < BLOCK_TOKENS
