#!/usr/bin/env bash
# Builds and runs the tests: the fast ones, with --all every test that this machine can run, or those of a label. Where there is a
# CUDA compiler, the flavour with CUDA is what is built: for this machine's GPU, else for Hopper.
#   scripts/test.sh [--all | --label LABEL] [--target TARGET] [--build-dir DIR] [cmake options]
# --target: what to build, where that is less than everything.
set -euo pipefail
source "$(dirname "$0")/packages.sh"
cd "$root_dir"

label=(-L fast)
build_dir=build-test
target=all
options=()
while [ $# -gt 0 ]; do
  case "$1" in
    --all) label=() ;;
    --label) label=(-L "^${2:?--label needs a label of tests}\$"); shift ;;
    --target) target="${2:?--target needs a target of the build}"; shift ;;
    --build-dir) build_dir="${2:?--build-dir needs a folder}"; shift ;;
    *) options+=("$1") ;;
  esac
  shift
done
ensure_packages "${build_packages[@]}" "${test_packages[@]}"
flavour=(-DFP4T_CUDA=off)
without_cuda() {  # as CMakeLists.txt reads the option: in any case, with or without a type; the last one counts
  local option choice=''
  for option in ${options[@]+"${options[@]}"}; do
    [[ "$option" =~ ^-DFP4T_CUDA(:[A-Za-z]+)?=(.*)$ ]] && choice="${BASH_REMATCH[2],,}"
  done
  [ "$choice" = off ]
}
without_cuda || read -ra flavour <<<"$(cuda_options 90a)"
begin=$SECONDS
cmake -S . -B "$build_dir" -G Ninja -DCMAKE_BUILD_TYPE=Release -DFP4T_TESTS=ON -DFP4T_UNITY=ON "${flavour[@]}" \
  ${options[@]+"${options[@]}"}
cmake --build "$build_dir" --target "$target"
if [ ${#label[@]} -eq 0 ] && [ "${flavour[0]}" = -DFP4T_CUDA=on ]; then
  cmake --build "$build_dir" --target gpu_tests  # "skipped" where there is no GPU
fi
echo "== tests built in $((SECONDS - begin)) s"
ctest --test-dir "$build_dir" "${label[@]}" --output-on-failure --no-tests=error
