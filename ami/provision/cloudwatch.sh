#!/usr/bin/env bash
# Layer "cloudwatch": the CloudWatch agent, which ships log files and disk, memory and GPU figures. Installed, not
# started: a machine starts it once its node file names a configuration (kvduplex-cloudwatch.service).
#
# AWS signs each package; the key's fingerprint stands in the CloudWatch user guide, "Verifying the signature of the
# CloudWatch agent package". There is no repository, hence no other way to pin a version than its path.
# shellcheck source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
begin cloudwatch
need CLOUDWATCH_AGENT_VERSION "which CloudWatch agent to install, e.g. 1.300072.0b1766"
need CLOUDWATCH_AGENT_URL "where the agent is downloaded from"
need CLOUDWATCH_AGENT_KEY_FINGERPRINT "which key must have signed it"
readonly PACKAGE=amazon-cloudwatch-agent
# The package appends its own revision to the agent's version.
readonly WANTED=$CLOUDWATCH_AGENT_VERSION-1

install_agent() { # install_agent FOLDER
  local deb="$1/$PACKAGE.deb" url="$CLOUDWATCH_AGENT_URL/ubuntu/amd64/$CLOUDWATCH_AGENT_VERSION/$PACKAGE.deb"
  download "$CLOUDWATCH_AGENT_URL/assets/$PACKAGE.gpg" "$1/key"
  trusted_key "$1/key" "$CLOUDWATCH_AGENT_KEY_FINGERPRINT" "$1/keyring.gpg"
  download "$url" "$deb"
  download "$url.sig" "$deb.sig"
  gpgv --keyring "$1/keyring.gpg" "$deb.sig" "$deb" || die "$url: its signature does not verify; do not install it"
  [ -z "${CLOUDWATCH_AGENT_SHA256:-}" ] || check_sha256 "$deb" "$CLOUDWATCH_AGENT_SHA256"
  dpkg --install "$deb" >/dev/null || die "dpkg could not install $url; its message is above"
}

apt_install acl
if [ "$(package_version "$PACKAGE")" = "$WANTED" ]; then
  say "the CloudWatch agent is $WANTED already"
else
  say "CloudWatch agent: found '$(package_version "$PACKAGE")', installing $WANTED"
  work=$(mktemp -d)
  install_agent "$work"
  rm -rf "$work"
  changed=$((changed + 1))
  [ "$(package_version "$PACKAGE")" = "$WANTED" ] ||
    die "the package calls itself $(package_version "$PACKAGE") and not $WANTED; correct cloudwatch_agent.version in the image recipe"
fi

# The agent reads our logs under its own account, and nothing else of ours: membership in the group "kvduplex" would
# show it the keys in /etc/kvduplex as well.
readonly LOGS=/var/log/kvduplex
if ! getfacl --absolute-names --omit-header "$LOGS" | grep -qx 'default:user:cwagent:r--'; then
  setfacl --modify user:cwagent:r-x,default:user:cwagent:r-- "$LOGS"
  changed=$((changed + 1))
fi
hold "$PACKAGE"
end
