#!/usr/bin/env bash
# Builds the flavour with CUDA for this machine's GPU and runs the tests with the label gpu.
#   scripts/test_gpu.sh [--check memcheck|racecheck|initcheck|synccheck] [--only REGEX] [--build-dir DIR] [cmake options]
# With --check every op's test runs under compute-sanitizer instead: scripts/run_gpu_tests.py says what is left out.
# --only runs the tests whose names match.
set -euo pipefail
source "$(dirname "$0")/packages.sh"
cd "$root_dir"

check=
only=
build_dir=build-gpu
options=()
while [ $# -gt 0 ]; do
  case "$1" in
    --check) check="${2:?--check needs a tool of compute-sanitizer}"; shift ;;
    --only) only="${2:?--only needs a regular expression}"; shift ;;
    --build-dir) build_dir="${2:?--build-dir needs a folder}"; shift ;;
    *) options+=("$1") ;;
  esac
  shift
done
[ -n "$(gpu_architecture)" ] || { echo "no GPU here: nvidia-smi names none" >&2; exit 1; }
ensure_packages "${build_packages[@]}" "${test_packages[@]}"
read -ra flavour <<<"$(cuda_options)"
[ "${flavour[0]}" = -DFP4T_CUDA=on ] || exit 1
begin=$SECONDS
cmake -S . -B "$build_dir" -G Ninja -DCMAKE_BUILD_TYPE=Release -DFP4T_TESTS=ON -DFP4T_UNITY=ON "${flavour[@]}" \
  ${options[@]+"${options[@]}"}
cmake --build "$build_dir" --target gpu_tests
echo "== built in $((SECONDS - begin)) s"
runner=(python3 scripts/run_gpu_tests.py --build "$build_dir")
[ -z "$check" ] || runner+=(--check "$check")
"${runner[@]}" ${only:+--only "$only"}
