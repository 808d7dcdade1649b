# shellcheck shell=sh
# For people who look around on a machine; services do not read this.
for folder in /opt/aws/neuron/bin /opt/amazon/efa/bin; do
  case ":$PATH:" in *":$folder:"*) ;; *) if [ -d "$folder" ]; then PATH=$PATH:$folder; fi ;; esac
done
unset folder
export PATH
