"""`tierkv size`: what a model's KV cache takes in the store, from its config.json."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierkv.commands import output
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from tierkv.adapters.sizing.grouping import GroupSize
    from tierkv.adapters.sizing.layers import Model
    from tierkv.adapters.sizing.plan import ContextSize, Recommendation

_POLICIES = ("all", "periodic", "boundary")
_MAX_CONFIG_BYTES = 16 << 20


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "size",
        help="say what a model's KV cache takes, and how large DRAM and NVMe should be",
        description="Reads a Hugging Face config.json and prints the bytes a token and a block by KV-cache group and "
        "shard as vLLM lays them out, what a context takes in the store under each policy, and sizes of DRAM and NVMe "
        "for a number of sessions. Needs neither vLLM nor the weights. A model that is not known is refused.",
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--model-config",
        metavar="FILE",
        required=True,
        help="the model's config.json, or the directory it lies in",
    )
    parser.add_argument(
        "--context", metavar="TOKENS", type=output.count_argument, default=100_000,
        help="length of a session's context (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--sessions", metavar="N", type=output.count_argument, default=16,
        help="sessions whose contexts are to be kept (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--policy", choices=_POLICIES, default="periodic",
        help="what is kept of sliding-window and chunked-local groups, for the recommendation (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--period-tokens", metavar="TOKENS", type=output.count_argument, default=2048,
        help="the distance of the boundaries of 'periodic' (default %(default)s)",
    )  # fmt: skip
    engine = parser.add_argument_group("engine settings")
    engine.add_argument(
        "--block-tokens", metavar="N", type=output.count_argument, default=16,
        help="vLLM's --block-size (default %(default)s); models with recurrent layers get longer ones",
    )  # fmt: skip
    engine.add_argument(
        "--tp", metavar="N", type=output.count_argument, default=1, help="tensor-parallel ranks"
    )
    engine.add_argument("--pp", metavar="N", type=output.count_argument, default=1, help="pipeline stages")
    engine.add_argument(
        "--kv-dtype", metavar="DTYPE", default="auto",
        help="vLLM's --kv-cache-dtype: auto, bfloat16, float16, float32, fp8, fp8_e4m3, fp8_e5m2, fp8_ds_mla",
    )  # fmt: skip
    engine.add_argument(
        "--dtype", metavar="DTYPE", default="auto",
        help="vLLM's --dtype, of the model: auto, bfloat16, float16, float32",
    )  # fmt: skip
    engine.add_argument(
        "--state-dtype", metavar="DTYPE", default="auto",
        help="vLLM's --mamba-ssm-cache-dtype, of recurrent states; its CPU build takes float32 where it can",
    )  # fmt: skip
    engine.add_argument(
        "--prefill-tokens", metavar="N", type=output.count_argument, default=8192,
        help="vLLM's --max-num-batched-tokens: recurrent states are stored where a step ends (default %(default)s)",
    )  # fmt: skip
    output.add_json_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """0; a model that is not known is an error."""
    from tierkv.adapters.sizing.families import read_model
    from tierkv.adapters.sizing.grouping import group_layers, resolve_kv_dtype
    from tierkv.adapters.sizing.plan import context_size, recommend

    output.check_writable(arguments.json)
    model = read_model(_read_config(arguments.model_config), arguments.dtype)
    kv_dtype = resolve_kv_dtype(model, arguments.kv_dtype)
    groups = group_layers(
        model,
        block_tokens=arguments.block_tokens,
        kv_dtype=kv_dtype,
        state_dtype=arguments.state_dtype,
        tensor_size=arguments.tp,
        pipeline_size=arguments.pp,
    )
    contexts = [
        context_size(
            groups,
            arguments.context,
            policy,
            period_tokens=arguments.period_tokens,
            prefill_tokens=arguments.prefill_tokens,
        )
        for policy in _POLICIES
    ]
    chosen = next(context for context in contexts if context.policy == arguments.policy)
    advice = recommend(groups, chosen, arguments.sessions)
    output.write_json(_facts(arguments, model, kv_dtype, groups, contexts, advice), arguments.json)
    _print(output.console(arguments.json), arguments, model, kv_dtype, groups, contexts, advice)
    return 0


def _read_config(path: str) -> Any:
    import msgspec

    place = Path(path)
    if place.is_dir():
        place = place / "config.json"
    try:
        with place.open("rb") as file:
            text = file.read(_MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--model-config {place}: cannot be read: {error.strerror}") from error
    if len(text) > _MAX_CONFIG_BYTES:
        raise ConfigError(f"--model-config {place}: more than {_MAX_CONFIG_BYTES} bytes are no config.json")
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--model-config {place}: is not JSON: {error}") from error


def _facts(
    arguments: argparse.Namespace,
    model: Model,
    kv_dtype: str,
    groups: tuple[GroupSize, ...],
    contexts: list[ContextSize],
    advice: Recommendation,
) -> dict[str, Any]:
    """The result as JSON."""
    from tierkv.adapters.sizing.plan import slot_bytes

    return {
        "model_type": model.name,
        "layers": len(model.layers),
        "dtype": model.dtype,
        "kv_dtype": kv_dtype,
        "tensor_parallel": arguments.tp,
        "pipeline_parallel": arguments.pp,
        "token_bytes": sum(group.token_bytes or 0 for group in groups),
        "groups": [
            {
                "index": group.index,
                "kind": group.kind.value,
                "description": group.description,
                "layers": group.layers,
                "block_tokens": group.block_tokens,
                "token_bytes": group.token_bytes,
                "block_bytes": group.block_bytes,
                "slot_bytes": sum(slot_bytes(group)),
                "parts": group.parts,
                "replicas": group.replicas,
                "copies": group.copies,
                "stages": [
                    {"stage": share.stage, "layers": share.layers, "part_bytes": share.part_bytes}
                    for share in group.stages
                ],
            }
            for group in groups
        ],
        "context_tokens": arguments.context,
        "policies": {
            context.policy: {
                "resume_tokens": context.tokens,
                "blocks": context.blocks,
                "store_bytes": context.store_bytes,
                "groups": [
                    {"index": group.index, "blocks": group.blocks, "store_bytes": group.store_bytes}
                    for group in context.groups
                ],
            }
            for context in contexts
        },
        "recommendation": {
            "sessions": advice.sessions,
            "policy": arguments.policy,
            "dram_bytes": advice.dram_bytes,
            "nvme_bytes": advice.nvme_bytes,
            "slab_bytes": advice.slab_bytes,
        },
        "notes": _notes(arguments, model, groups, advice),
    }


def _print(
    human: Any,
    arguments: argparse.Namespace,
    model: Model,
    kv_dtype: str,
    groups: tuple[GroupSize, ...],
    contexts: list[ContextSize],
    advice: Recommendation,
) -> None:
    """The tables for people."""
    from tierkv.observe import figures

    title = (
        f"{model.name}: {len(model.layers)} layers, {kv_dtype} cache, TP {arguments.tp}, PP {arguments.pp}"
    )
    shards = output.table(
        title, "group", "layers", "tokens a block", "bytes a token", "bytes a block", "shards a block (bytes each)"
    )  # fmt: skip
    for group in groups:
        sizes = " + ".join(f"{group.parts} x {share.part_bytes:,}" for share in group.stages)
        token = "one state" if group.token_bytes is None else f"{group.token_bytes:,.6g}"
        if group.token_bytes is not None and group.token_bytes == int(group.token_bytes):
            token = f"{int(group.token_bytes):,}"
        shards.add_row(
            f"{group.index} {group.description}", str(group.layers), f"{group.block_tokens:,}", token,
            f"{group.block_bytes:,}", sizes,
        )  # fmt: skip
    human.print(shards)
    same = len({context.store_bytes for context in contexts}) == 1
    title = f"a context of {arguments.context:,} tokens in the store"
    if same:
        title += " (no group has a policy to choose)"
    held = output.table(title, "policy", "blocks", "bytes", "resumes at")
    for context in contexts if not same else [c for c in contexts if c.policy == arguments.policy]:
        held.add_row(
            context.policy, figures.count(context.blocks), figures.size(context.store_bytes),
            f"{context.tokens:,}",
        )  # fmt: skip
    human.print(held)
    human.print(
        f"for {advice.sessions:,} sessions, {arguments.policy}: DRAM [bold]{figures.size(advice.dram_bytes)}[/bold], "
        f"NVMe [bold]{figures.size(advice.nvme_bytes)}[/bold]",
        soft_wrap=True,
    )
    for note in _notes(arguments, model, groups, advice):
        human.print(f"note: {note}", soft_wrap=True)


def _notes(
    arguments: argparse.Namespace, model: Model, groups: tuple[GroupSize, ...], advice: Recommendation
) -> list[str]:
    """What a reader should know besides the figures."""
    from tierkv.memory import DEFAULT_SLAB_BYTES

    notes = list(model.notes)
    copies = max(group.copies for group in groups)
    if copies > 1:
        notes.append(
            f"{arguments.tp} tensor-parallel ranks are more than the model has key-value heads: each head is held, and "
            f"stored, {copies} times"
        )
    if advice.slab_bytes > DEFAULT_SLAB_BYTES:
        notes.append(
            f"blocks are larger than a slab: set dram.slab_bytes and nvme.slab_bytes to {advice.slab_bytes}"
        )
    return notes
