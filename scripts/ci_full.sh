#!/usr/bin/env bash
# What does not fit .ci/run: every test in Release, the fast tests in Debug, under the address and undefined
# sanitizers, and with a second compiler. Records the result of each part in tests/RESULTS.md.
#   scripts/ci_full.sh [release] [debug] [sanitize] [clang]      (no argument: all of them)
set -uo pipefail
source "$(dirname "$0")/packages.sh"
cd "$root_dir"

results=tests/RESULTS.md
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(release debug sanitize clang)

# record PART LOG SECONDS: replaces the part's row in the table of results.
record() {
  local line commit
  line="$(grep -aE 'tests passed, .* failed out of' "$2" | tail -1)"
  [ -n "$line" ] || line="did not get to the tests"
  commit="$(git rev-parse --short HEAD)$(git diff --quiet HEAD || echo ' with changes')"
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

failed=()
for part in "${parts[@]}"; do
  case "$part" in
    release) run_part release scripts/test.sh --all ;;
    debug) run_part debug scripts/test.sh --build-dir build-debug -DCMAKE_BUILD_TYPE=Debug ;;
    sanitize)
      run_part sanitize scripts/test.sh --build-dir build-sanitize -DCMAKE_BUILD_TYPE=Debug \
        -DFP4T_SANITIZE=address,undefined
      ;;
    clang)
      ensure_packages clang
      run_part clang scripts/test.sh --build-dir build-clang -DCMAKE_CXX_COMPILER=clang++
      ;;
    *) echo "unknown part '$part' (release, debug, sanitize, clang)" >&2; exit 2 ;;
  esac || failed+=("$part")
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "== failed: ${failed[*]}"
  exit 1
fi
echo "== all parts passed: ${parts[*]}"
