"""`tierkv demo vllm`: a session that hops between two real vLLM engines which share one cache."""

from __future__ import annotations

import argparse
from typing import Any

from tierkv.commands import output


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("demo", help="show tierkv at work in an engine")
    kinds = parser.add_subparsers(title="demos", metavar="ENGINE", required=True)
    vllm = kinds.add_parser(
        "vllm",
        help="two vLLM engines share one cache",
        description="Starts an agent and two vLLM engines (CPU build) with a small model of random weights, and lets a "
        "session of several turns hop between them, each turn once with the shared cache and once without. Exit status "
        "1 if the tokens differ or nothing came from the cache.",
    )
    vllm.set_defaults(run=run)
    vllm.add_argument(
        "--python", metavar="PATH", help="an interpreter with vllm and tierkv (default: .venv-vllm's)"
    )
    count = output.count_argument
    vllm.add_argument("--turns", type=count, default=6, help="turns of the session (default 6)")
    vllm.add_argument(
        "--first-tokens", type=count, default=3000, help="tokens of the first prompt (default 3000)"
    )
    vllm.add_argument(
        "--turn-tokens", type=count, default=200, help="tokens that each turn adds (default 200)"
    )
    vllm.add_argument("--answer-tokens", type=count, default=16, help="tokens of each answer (default 16)")
    output.add_json_option(vllm)


def run(arguments: argparse.Namespace) -> int:
    """0 when the tokens are equal and the cache was used, else 1."""
    from tierkv.adapters.vllm_demo.session import find_python, run_demo
    from tierkv.errors import ConfigError

    python = find_python(arguments.python)
    output.check_writable(arguments.json)
    if arguments.turns < 2:
        raise ConfigError("demo vllm: --turns must be 2 or more, since the first turn can find nothing")
    longest = arguments.first_tokens + arguments.turns * (arguments.turn_tokens + arguments.answer_tokens)
    if longest > 16000:
        raise ConfigError(f"demo vllm: the last turn would have {longest} tokens; 16000 are possible")
    human = output.console(arguments.json)
    result = run_demo(
        python, turns=arguments.turns, first_tokens=arguments.first_tokens, turn_tokens=arguments.turn_tokens,
        answer_tokens=arguments.answer_tokens, say=human.print,
    )  # fmt: skip
    shown = output.table(
        "Time to first token, second and later turns",
        "engine",
        "tierkv ms",
        "without ms",
        "tokens from tierkv",
    )
    for name, engine in result.engines.items():
        shown.add_row(
            name, f"{engine.ttft_ms:.0f}", f"{engine.ttft_ms_without:.0f}", str(engine.external_hit_tokens)
        )
    shown.add_row(
        "both", f"{result.ttft_ms:.0f}", f"{result.ttft_ms_without:.0f}", str(result.external_hit_tokens)
    )
    human.print(shown)
    total = sum(result.hit_tokens.values())
    sources = output.table("Prompt tokens by where they came from", "source", "tokens", "share")
    for source, tokens in result.hit_tokens.items():
        sources.add_row(source, str(tokens), f"{tokens / total:.1%}")
    human.print(sources)
    human.print(f"greedy tokens with and without tierkv: {'equal' if result.tokens_equal else 'DIFFERENT'}")
    output.write_json(result, arguments.json)
    return 0 if result.good else 1
