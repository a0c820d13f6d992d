#!/bin/sh
# Builds and runs the C++ tests with address + undefined sanitizers, then with the thread sanitizer.
# Usage: native/tests/run_sanitizers.sh [build folder]. The compiler is $CXX, else clang++, else g++.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
build=${1:-$here/../../build/sanitizers}
compiler=${CXX:-}
[ -n "$compiler" ] || compiler=$(command -v clang++ || command -v g++)

run() {
    name=$1
    sanitizer=$2
    echo "== $name ($compiler)"
    cmake -S "$here/.." -B "$build/$name" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_COMPILER="$compiler" \
        -DTIERKV_MODULE=OFF -DTIERKV_TESTS=ON -DTIERKV_WERROR=ON -DTIERKV_SANITIZER="$sanitizer" >/dev/null
    cmake --build "$build/$name" --parallel 2
    # In this shell's order, output as it comes: a sanitizer's report must not be lost in a log.
    for test in checksum copy index; do
        "$build/$name/test_$test"
    done
}

export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
run address address,undefined
run thread thread
echo "== all clean"
