#!/usr/bin/env bash
# Formats the sources in place, or with --check reports what is not formatted.
set -euo pipefail
source "$(dirname "$0")/packages.sh"
cd "$root_dir"
ensure_packages clang-format-14
mapfile -t files < <(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')
if [ "${1:-}" = --check ]; then
  clang-format-14 --dry-run --Werror "${files[@]}"
  echo "format: ${#files[@]} files"
else
  clang-format-14 -i "${files[@]}"
fi
