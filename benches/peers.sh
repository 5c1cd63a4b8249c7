#!/usr/bin/env bash
# Forebay beside llama.cpp and ik_llama.cpp on one file, everything resident, in turn: a table of medians and ratios.
#
#   benches/peers.sh MODEL.gguf LLAMA_BENCH [IK_LLAMA_BENCH] [-- OPTIONS of cargo xtask peers]
#
# LLAMA_BENCH and IK_LLAMA_BENCH are the `llama-bench` programs of the two, built for this machine (GGML_NATIVE).
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 2; }
model=$(realpath "$1") peers=(--peer "llama.cpp=$(realpath "$2")")
shift 2
if [ $# -gt 0 ] && [ "$1" != -- ]; then
  peers+=(--peer "ik_llama.cpp=$(realpath "$1")")
  shift
fi
[ "${1:-}" != -- ] || shift
cd "$(dirname "$0")/.."
cargo build --release -q -p forebay -p xtask
exec cargo run --release -q -p xtask -- peers "$model" "${peers[@]}" "$@"
