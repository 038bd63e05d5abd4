#!/bin/bash
# Start a training script on the hosts of a file, one torchrun each: launch.sh HOSTS SCRIPT [ARGUMENTS...]
# Every host has the script and the file under the same path. REMOTE says how a command gets to a host.
set -euo pipefail
hosts=$1
shift
mapfile -t names < <(grep -v '^#' "$hosts" | awk '{print $1}')
mapfile -t slots < <(grep -v '^#' "$hosts" | sed -n 's/.*slots=\([0-9]*\).*/\1/p')
head=${MASTER_ADDR:-${names[0]}} port=${MASTER_PORT:-29400}
started=()
for node in "${!names[@]}"; do
    command=(torchrun --nnodes "${#names[@]}" --node-rank "$node" --nproc-per-node "${slots[$node]}"
        --master-addr "$head" --master-port "$port" "$@")
    ${REMOTE:-ssh} "${names[$node]}" "cd $(printf '%q' "$PWD") && $(printf '%q ' "${command[@]}")" &
    started+=($!)
done
status=0
for process in "${started[@]}"; do wait "$process" || status=$?; done
exit "$status"
