#!/usr/bin/env bash
# What does not fit .ci/run: every test in Release, those on 2, 4 and 8 CPU ranks by themselves, the CUDA side compiled for
# Blackwell, the fast tests in Debug, under the address and undefined sanitizers, and with a second compiler. Records each
# part's result in tests/RESULTS.md.
#   scripts/ci_full.sh [release] [ranks] [cuda] [debug] [sanitize] [clang]      (no argument: all of them)
# ranks, debug, sanitize and clang build without CUDA: they look at the host's code, and compiling every kernel again
# takes longer than all their tests. What tests/cuda_host runs on the host is in release.
set -uo pipefail
source "$(dirname "$0")/packages.sh"
cd "$root_dir"

results=tests/RESULTS.md
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(release ranks cuda debug sanitize clang)

# record PART LOG SECONDS: replaces the part's row in the table of results.
record() {
  local line commit changes=''
  line="$(grep -aE 'tests passed.* out of [0-9]+|^compiled for ' "$2" | tail -1)"
  [ -n "$line" ] || line="did not build"
  commit="$(git rev-parse --short HEAD 2>/dev/null)" || commit='not a checkout'
  # The table itself does not count: the part before wrote its row there.
  [ "$commit" = 'not a checkout' ] || git diff --quiet HEAD -- . ":!$results" || changes=' with changes'
  commit+="$changes"
  grep -v "^| $1 |" "$results" >"$results.tmp"
  echo "| $1 | $(date +%Y-%m-%d) | $commit | $line | $3 |" >>"$results.tmp"
  mv "$results.tmp" "$results"
  echo "== $1: $line, $3 s"
}

run_part() {
  local part="$1" log="build-$1.log" begin=$SECONDS status
  shift
  "$@" 2>&1 | tee "$log"
  status=${PIPESTATUS[0]}
  record "$part" "$log" $((SECONDS - begin))
  rm -f "$log"
  return "$status"
}

# The architectures that .ci/run leaves out: the kernels and the program, warnings (spills in tensor-core kernels among
# them) as errors. Nothing here runs.
compile_cuda() {
  local build_dir=build-cuda archs="100a;103a"
  cmake -S . -B "$build_dir" -G Ninja -DCMAKE_BUILD_TYPE=Release -DFP4T_TESTS=OFF -DFP4T_UNITY=ON -DFP4T_CUDA=on \
    "-DCMAKE_CUDA_COMPILER=$(cuda_compiler)" "-DFP4T_CUDA_ARCHS=$archs" &&
    cmake --build "$build_dir" --target kernels_cuda fp4train &&
    echo "compiled for $archs"
}

failed=()
for part in "${parts[@]}"; do
  case "$part" in
    release) run_part release scripts/test.sh --all ;;
    ranks) run_part ranks scripts/test.sh --label ranks --target ranks_tests --build-dir build-ranks -DFP4T_MPI=on \
      -DFP4T_CUDA=off ;;
    cuda)
      ensure_packages "${build_packages[@]}"
      [ -n "$(cuda_compiler)" ] || { echo "== cuda: left out, there is no CUDA compiler here"; continue; }
      run_part cuda compile_cuda
      ;;
    debug) run_part debug scripts/test.sh --build-dir build-debug -DCMAKE_BUILD_TYPE=Debug -DFP4T_CUDA=off ;;
    sanitize)
      run_part sanitize scripts/test.sh --build-dir build-sanitize -DCMAKE_BUILD_TYPE=Debug \
        -DFP4T_SANITIZE=address,undefined -DFP4T_CUDA=off
      ;;
    clang)
      ensure_packages clang
      run_part clang scripts/test.sh --build-dir build-clang -DCMAKE_CXX_COMPILER=clang++ -DFP4T_CUDA=off
      ;;
    *) echo "unknown part '$part' (release, ranks, cuda, debug, sanitize, clang)" >&2; exit 2 ;;
  esac || failed+=("$part")
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "== failed: ${failed[*]}"
  exit 1
fi
echo "== all parts passed: ${parts[*]}"
