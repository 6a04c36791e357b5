# Sourced by the other scripts: installs the Debian or Ubuntu packages that are missing.
#   ensure_packages PACKAGE...

root_dir="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
build_packages=(build-essential cmake ninja-build ccache libyaml-cpp-dev libspdlog-dev nlohmann-json3-dev
  libcli11-dev libxxhash-dev)
test_packages=(libgtest-dev python3 fortunes)

ensure_packages() {
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
