"""The demo's engine: one vLLM in a process of its own, told by lines of JSON what to do.

`python -m tierkv.adapters.vllm_demo.engine MODEL SETTINGS COMMANDS_FD ANSWERS_FD`. Runs where vLLM is installed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tierkv.adapters.engine_process import VLLM_ENVIRONMENT, serve

ENVIRONMENT = {
    **VLLM_ENVIRONMENT,
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""What such an engine needs of its environment."""
VOCABULARY = 4096
MAX_TOKENS = 16384
BLOCK_TOKENS = 32
SPARE_BLOCKS = 16
_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "vocab_size": VOCABULARY, "max_position_embeddings": MAX_TOKENS, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "torch_dtype": "float32", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def write_model(directory: Path) -> None:
    """A small Llama with random weights, the same in every process, whose answers depend on all of the prompt."""
    import numpy as np
    from safetensors.numpy import save_file

    (directory / "config.json").write_text(json.dumps(_CONFIG, indent=1))
    random = np.random.default_rng(0)
    hidden, inner, head = 512, 1408, 64
    shapes = {"self_attn.q_proj": (8 * head, hidden), "self_attn.k_proj": (4 * head, hidden)}
    shapes |= {"self_attn.v_proj": (4 * head, hidden), "self_attn.o_proj": (hidden, 8 * head)}
    shapes |= {
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }

    def matrix(rows: int, columns: int) -> Any:
        return (random.standard_normal((rows, columns)) * 1.5 / columns**0.5).astype(np.float32)

    weights: dict[str, Any] = {
        "model.embed_tokens.weight": matrix(VOCABULARY, hidden),
        "lm_head.weight": matrix(VOCABULARY, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for layer in range(8):
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = np.ones(hidden, np.float32)
    save_file(weights, directory / "model.safetensors")


class Engine:
    """One engine; its calls are the commands."""

    def __init__(self, model: str, blocks: int, connector: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self._llm = LLM(
            model=model, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=blocks, max_model_len=(blocks - SPARE_BLOCKS // 2) * BLOCK_TOKENS,
            max_num_batched_tokens=2048, max_num_seqs=2, seed=0, disable_log_stats=False,
            kv_transfer_config=KVTransferConfig(**connector),
        )  # fmt: skip
        self._number = 0

    def ready(self) -> None:
        """Nothing: whoever has this answered knows that the engine is there."""

    def turn(self, prompt: list[int], max_tokens: int, salt: str, shared: bool) -> dict[str, Any]:
        """Answers a prompt. ttft_s: until the first token was there; cached: prompt tokens that were not computed.

        salt: keeps apart what must not be mixed; shared: whether the store may be used.
        """
        from vllm import SamplingParams

        wishes = None if shared else {"kv_transfer_params": {"tierkv": {"load": False, "save": False}}}
        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=wishes
        )
        engine = self._llm.llm_engine
        before = self._external_tokens()
        self._number += 1
        begun_s = time.monotonic()
        engine.add_request(str(self._number), {"prompt_token_ids": prompt, "cache_salt": salt}, sampling)
        first_s: float | None = None
        output: Any = None
        while engine.has_unfinished_requests():
            for output in engine.step():
                if first_s is None and output.outputs and output.outputs[0].token_ids:
                    first_s = time.monotonic()
        if output is None or first_s is None:
            raise RuntimeError("the engine gave no answer")
        return {
            "tokens": list(output.outputs[0].token_ids),
            "ttft_s": first_s - begun_s,
            "cached": output.num_cached_tokens or 0,
            "external": self._external_tokens() - before,
        }

    def _external_tokens(self) -> int:
        """Prompt tokens that came from the connector so far."""
        return int(
            sum(
                metric.value
                for metric in self._llm.get_metrics()
                if metric.name == "vllm:external_prefix_cache_hits"
            )
        )

    def settle(self) -> None:
        """Steps until saves under way have ended: an engine without requests does not step by itself when offline."""
        core = self._llm.llm_engine.engine_core.engine_core
        deadline_s = time.monotonic() + 30.0
        while core.scheduler.has_requests() and time.monotonic() < deadline_s:
            core.step_fn()

    def figures(self) -> dict[str, float]:
        """The connector's figures, with their labels."""
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            value = getattr(metric, "value", None)
            if metric.name.startswith("vllm:tierkv_") and value:
                source = metric.labels.get("source", "")
                found[f"{metric.name.removeprefix('vllm:tierkv_')}{'_' if source else ''}{source}"] = value
        return found


def main() -> None:
    """Serves commands until the other end closes. With MODEL alone: writes the model there, and that is all."""
    model = sys.argv[1]
    if len(sys.argv) == 2:
        write_model(Path(model))
        return
    commands, answers = (int(fd) for fd in sys.argv[3:5])
    serve(Engine(model, **json.loads(sys.argv[2])), commands, answers)
    sys.stdout.flush()
    os._exit(0)  # vLLM's own threads would keep the process for seconds


if __name__ == "__main__":
    main()
