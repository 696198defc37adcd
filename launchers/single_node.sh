#!/usr/bin/env bash
# Train on this machine:  NPROC_PER_NODE=8 bash launchers/single_node.sh data.latent_data_root=STORE [key=value ...]
#
#   NPROC_PER_NODE   ranks (default: one for each GPU, or 1)
#   CONFIG_NAME      preset (default: mmdit_stable); DS_CONFIG a DeepSpeed JSON, for instance ds_configs/zero2.json
#   MASTER_PORT      default 29500
#   LEARNING_RATE or OPTIMIZER_LR, GRAD_CLIP_NORM, WARMUP_STEPS, LATENT_LOSS_WEIGHT, GRAD_ACCUM_STEPS, LATENT_DIM, DTYPE
# All of them: docs/launchers.md
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/_env.sh"
. "$here/_words.sh"

for name in NNODES:1 NODE_RANK:0 HOSTFILE:; do
    given=${name%:*}
    if [ -n "${!given:-}" ] && [ "${!given}" != "${name#*:}" ]; then
        mmldlm_fail "$given=${!given}, but this script trains on one node" "use: bash launchers/multi_node.sh, or unset $given"
    fi
done
mmldlm_words
mmldlm_env
procs=${NPROC_PER_NODE:-$(mmldlm_default_procs)}
mmldlm_check "$procs" "$@"
mmldlm_share_cores "$procs"
exec torchrun --nnodes 1 --nproc_per_node "$procs" --master_addr 127.0.0.1 --master_port "${MASTER_PORT:-29500}" \
    -m mmldlm.train "${MMLDLM_WORDS[@]}" "$@"
