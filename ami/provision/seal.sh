#!/usr/bin/env bash
# Layer "seal", always last: takes out what must not be shared by every machine made from the image.
# shellcheck source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
begin seal

apt-get clean
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /root/.cache /home/*/.cache
# Keys and histories of the build; machines are reached through Session Manager, never by a key.
find /root /home -maxdepth 3 \( -name authorized_keys -o -name '.*_history' \) -delete
rm -f /etc/ssh/ssh_host_*
rm -f /etc/kvduplex/node.yaml
find /var/log -type f -exec truncate -s 0 {} +
# An empty machine id makes systemd draw a new one at the first boot of each machine.
if [ -s /etc/machine-id ]; then : >/etc/machine-id; fi
if command -v cloud-init >/dev/null; then cloud-init clean --logs --seed; fi
end
