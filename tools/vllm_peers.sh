#!/usr/bin/env bash
# Adds to vLLM's environment the caches that bench/bench_ttft.py measures beside tierkv; `make vllm-cpu` comes first.
#
#   tools/vllm_peers.sh [DIRECTORY]        (default .venv-vllm; about 150 MB)
#
# A peer that cannot be had is said to be so, and the benchmark reports it as absent: that is not an error. What is done
# already is not done again: a stamp in the environment holds the digest of constraints-peers.txt.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=$(realpath -m "${1:-.venv-vllm}")
python=$environment/bin/python
lock_wait_s=1800

say() { printf 'vllm-peers: %s\n' "$*"; }

[[ -f $environment/.packages ]] || { say "error: there is no vLLM in $environment: run make vllm-cpu first" >&2; exit 1; }
exec 9>"$environment/.lock"
flock --timeout "$lock_wait_s" 9 || { say "error: another run has been at work on $environment for $lock_wait_s s" >&2; exit 1; }

wanted=$(sha256sum constraints-peers.txt | cut -d' ' -f1)
if [[ ! -f $environment/.peers || $(<"$environment/.peers") != "$wanted" ]]; then
    rm -f "$environment/.peers"
    if ! "$python" -m pip --disable-pip-version-check --quiet --quiet install --no-deps --requirement constraints-peers.txt; then
        say "Mooncake: absent, the package index does not give what constraints-peers.txt names (see above)"
        exit 0
    fi
    echo "$wanted" >"$environment/.peers"
fi

# The wheel brings programs and a module that need libraries of the system.
missing=
if ! reason=$("$python" -c 'import mooncake.store' 2>&1); then
    missing=$(tail -1 <<<"$reason")
else
    package=$("$python" -c 'import mooncake; print(next(iter(mooncake.__path__)))')
    missing=$(ldd "$package/mooncake_master" "$package/mooncake_client" | sed -n 's/^\s*\(\S*\) => not found/\1/p' | sort -u | tr '\n' ' ')
fi
if [[ -n $missing ]]; then
    say "Mooncake: absent, it does not load: $missing"
    say "on Debian: apt-get install libibverbs1 libnuma1 libcurl4"
    exit 0
fi
say "Mooncake: ready in $environment"
