#!/usr/bin/env bash
# The main job: installs what is missing, builds the trainer, pretrains and reinforces a small model.
#   scripts/quickstart.sh [fp4train options, for example --set run.seed=2 --set run.dir=runs/seed2]
set -euo pipefail
source "$(dirname "$0")/packages.sh"
cd "$root_dir"

ensure_packages "${build_packages[@]}" fortunes
begin=$SECONDS
read -ra flavour <<<"$(cuda_options)"
echo "== building (${flavour[0]#-D})"
cmake -S . -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DFP4T_TESTS=OFF -DFP4T_UNITY=ON "${flavour[@]}" >build-configure.log || { cat build-configure.log; exit 1; }
rm -f build-configure.log
cmake --build build --target fp4train
echo "== built in $((SECONDS - begin)) s"
build/fp4train --config configs/quickstart.yaml "$@"
echo "== quickstart finished, $((SECONDS - begin)) s after the packages were there"
