#!/usr/bin/env bash
# Builds the flavour with CUDA for this machine's GPU and runs the tests with the label gpu.
#   scripts/test_gpu.sh [--check memcheck|racecheck|initcheck|synccheck] [--build-dir DIR] [cmake options]
# With --check every op's test runs under compute-sanitizer instead (runs of the whole trainer are left out).
set -euo pipefail
source "$(dirname "$0")/packages.sh"
cd "$root_dir"

check=
build_dir=build-gpu
options=()
while [ $# -gt 0 ]; do
  case "$1" in
    --check) check="${2:?--check needs a tool of compute-sanitizer}"; shift ;;
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
if [ -z "$check" ]; then
  ctest --test-dir "$build_dir" -L gpu --output-on-failure --no-tests=error
  exit
fi
failed=()
for test in "$build_dir"/tests/test_gpu_*; do
  [ -x "$test" ] && [ -f "$test" ] || continue
  case "$test" in *test_gpu_engine_*) continue ;; esac
  if compute-sanitizer --tool "$check" --error-exitcode 9 "$test" >"$test.$check.log" 2>&1; then
    echo "$check $(basename "$test"): clean"
  else
    echo "$check $(basename "$test"): failed, see $test.$check.log"
    failed+=("$test")
  fi
done
[ ${#failed[@]} -eq 0 ] || exit 1
echo "== $check: clean"
