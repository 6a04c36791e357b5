# Sourced by the other scripts: installs the Debian or Ubuntu packages that are missing.
#   ensure_packages PACKAGE...   (FP4T_NO_INSTALL=1: leave it to the build to find what is there)
#   cuda_options [ARCHITECTURES] prints the CMake options of the flavour that fits this machine

root_dir="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
build_packages=(build-essential cmake ninja-build ccache libyaml-cpp-dev libspdlog-dev nlohmann-json3-dev
  libcli11-dev libxxhash-dev libpcre2-dev libutf8proc-dev libsentencepiece-dev libopenmpi-dev openmpi-bin)
test_packages=(libgtest-dev python3 fortunes)

ensure_packages() {
  [ -z "${FP4T_NO_INSTALL:-}" ] || return 0
  local missing=() package
  for package in "$@"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q '^install ok installed$' || missing+=("$package")
  done
  if [ ${#missing[@]} -eq 0 ]; then
    return
  fi
  local sudo=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || { echo "missing packages: ${missing[*]} (run as root, or install sudo)" >&2; exit 1; }
    sudo=(sudo)
  fi
  local begin=$SECONDS
  echo "== installing ${missing[*]}"
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  echo "== packages installed in $((SECONDS - begin)) s"
}

# The first GPU's architecture as the compiler names it ("90a"), or nothing.
gpu_architecture() {
  command -v nvidia-smi >/dev/null || return 0
  nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d '. ' | sed -n 's/^\([0-9]\+\)$/\1a/p'
}

cuda_compiler() {
  command -v "${CUDACXX:-nvcc}" || { [ -x /usr/local/cuda/bin/nvcc ] && echo /usr/local/cuda/bin/nvcc; } || true
}

# The flavour with CUDA where there is a compiler and either a GPU that the kernels are written for, or
# ARCHITECTURES to compile for without one.
cuda_options() {
  local gpu compiler
  gpu="$(gpu_architecture)"
  compiler="$(cuda_compiler)"
  case "$gpu" in
    '' | 90a | 100a | 103a) ;;
    *) echo "== this GPU (compute capability ${gpu%a}) is not one that the kernels are written for: without CUDA" >&2; gpu='' ;;
  esac
  if [ -n "$gpu" ] && [ -z "$compiler" ]; then
    echo "== there is a GPU but no CUDA compiler: without CUDA (install the CUDA Toolkit 13, or set CUDACXX)" >&2
  fi
  if [ -z "$compiler" ] || [ -z "${gpu:-${1:-}}" ]; then
    echo -DFP4T_CUDA=off
  else
    echo "-DFP4T_CUDA=on" "-DCMAKE_CUDA_COMPILER=$compiler" "-DFP4T_CUDA_ARCHS=${gpu:-$1}"
  fi
}
