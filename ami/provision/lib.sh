# shellcheck shell=bash
# Shared by every layer. Sourced, never run.
#
# Every function leaves alone what is already as wanted, so that a layer can run again on a finished image and change
# nothing; `changed` counts what was not.
set -euo pipefail
umask 022
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 NEEDRESTART_MODE=l

BUNDLE=${BUNDLE:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
# shellcheck disable=SC2034  # for the layers
readonly BUNDLE PREFIX=/opt/kvduplex
changed=0

say() { printf '%s: %s\n' "$LAYER" "$*"; }
die() {
  printf '%s: error: %s\n' "$LAYER" "$*" >&2
  exit 2
}

# need NAME WHY: the setting NAME must have a value.
need() {
  [ -n "${!1:-}" ] || die "setting $1 has no value: $2. Set it in the image recipe (docs/ami.md, \"Settings\")"
}

begin() {
  LAYER=$1
  [ "$(id -u)" = 0 ] || die "must run as root, runs as $(id -un); use sudo"
  say begin
}

end() { say "done, $changed change(s)"; }

# write_file PATH MODE [OWNER:GROUP] <CONTENT
write_file() {
  local path=$1 mode=$2 owner=${3:-root:root} wanted
  wanted=$(mktemp)
  cat >"$wanted"
  if ! cmp -s "$wanted" "$path" || [ "$(stat -c '%a %U:%G' "$path" 2>/dev/null)" != "${mode#0} $owner" ]; then
    install -D -m "$mode" -o "${owner%:*}" -g "${owner#*:}" "$wanted" "$path"
    changed=$((changed + 1))
    say "wrote $path"
  fi
  rm -f "$wanted"
}

# copy_file SOURCE PATH MODE [OWNER:GROUP]
copy_file() { write_file "$2" "$3" "${4:-root:root}" <"$1"; }

# make_folder PATH MODE OWNER:GROUP
make_folder() {
  if [ "$(stat -c '%a %U:%G' "$1" 2>/dev/null)" != "${2#0} $3" ]; then
    install -d -m "$2" -o "${3%:*}" -g "${3#*:}" "$1"
    changed=$((changed + 1))
  fi
}

package_installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }
package_version() { dpkg-query -W -f '${Version}' "$1" 2>/dev/null || true; }

# apt_install PACKAGE[=VERSION]...: packages whose repository is signed; versions are checked when given.
apt_install() {
  local wanted=() entry name
  for entry in "$@"; do
    name=${entry%%=*}
    if ! package_installed "$name" || { [ "$name" != "$entry" ] && [ "$(package_version "$name")" != "${entry#*=}" ]; }; then
      wanted+=("$entry")
    fi
  done
  [ ${#wanted[@]} = 0 ] && return
  apt_update_once
  say "apt-get install ${wanted[*]}"
  # Held packages are ours to move, deliberately; phased or surprise upgrades are not.
  apt-get install -y -qq --no-install-recommends --allow-change-held-packages "${wanted[@]}" >/dev/null ||
    die "apt-get could not install ${wanted[*]}; the lines above say which is missing"
  changed=$((changed + ${#wanted[@]}))
}

apt_update_once() {
  [ -n "${apt_updated:-}" ] && return
  apt-get update -qq || die "apt-get update failed; the lines above name the repository and the reason"
  apt_updated=1
}

# hold PACKAGE...: keep installed packages at their version; an unattended upgrade must not part driver and runtime.
hold() {
  local name
  for name in "$@"; do
    package_installed "$name" || continue
    apt-mark showhold | grep -qxF "$name" && continue
    apt-mark hold "$name" >/dev/null
    changed=$((changed + 1))
    say "holds $name $(package_version "$name")"
  done
}

# download URL FILE: over TLS 1.2 or newer, within ten minutes, three tries.
download() {
  curl --fail --silent --show-error --location --proto '=https' --tlsv1.2 --retry 3 --max-time 600 --output "$2" "$1" ||
    die "cannot download $1"
}

# check_sha256 FILE DIGEST
check_sha256() {
  local found
  found=$(sha256sum "$1" | cut -d' ' -f1)
  [ "$found" = "$2" ] || die "$1 has SHA-256 $found, the recipe says $2; it was altered, or the recipe names another version"
}

# trusted_key FILE FINGERPRINT KEYRING: turn an OpenPGP key into an apt or gpgv keyring, if it is the one expected.
trusted_key() {
  local home seen expected=${2// /}
  home=$(mktemp -d)
  seen=$(gpg --homedir "$home" --batch --with-colons --show-keys "$1" 2>/dev/null | awk -F: '$1 == "fpr" { print $10; exit }')
  if [ "$seen" != "$expected" ]; then
    rm -rf "$home"
    die "$1 holds the key ${seen:-(none)}, expected $expected; do not go on before the vendor's documentation confirms a new key"
  fi
  # Imported and exported, because vendors publish keys in binary form and in ASCII armour.
  gpg --homedir "$home" --batch --quiet --import "$1"
  gpg --homedir "$home" --batch --export "$expected" >"$home/keyring"
  copy_file "$home/keyring" "$3" 0644
  rm -rf "$home"
}

loader_path() { # loader_path NAME FOLDER
  write_file "/etc/ld.so.conf.d/$1.conf" 0644 <<<"$2"
  ldconfig
}
