#!/usr/bin/env bash
# Train on this machine:  NPROC_PER_NODE=8 bash launchers/single_node.sh data.latent_data_root=STORE [key=value ...]
#
#   NPROC_PER_NODE   ranks (default: the GPUs, or 1)
#   CONFIG_NAME      preset (default: mmdit_stable); DS_CONFIG a DeepSpeed JSON, for example ds_configs/zero2.json
#   MASTER_PORT      default: a free port
#   LEARNING_RATE or OPTIMIZER_LR, GRAD_CLIP_NORM, WARMUP_STEPS, LATENT_LOSS_WEIGHT, GRAD_ACCUM_STEPS, LATENT_DIM, DTYPE
# Complete list: docs/launchers.md
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/_env.sh"
. "$here/_launch_args.sh"

for name in NNODES:1 NODE_RANK:0 HOSTFILE:; do
    variable=${name%:*}
    if [ -n "${!variable:-}" ] && [ "${!variable}" != "${name#*:}" ]; then
        mmldlm_fail "$variable=${!variable}, but this script trains on one node" "use bash launchers/multi_node.sh, or unset $variable"
    fi
done
mmldlm_launch_args
mmldlm_leave_platform
mmldlm_env
procs=${NPROC_PER_NODE:-$(mmldlm_default_procs)}
mmldlm_check "$procs" "$@"
mmldlm_share_cores "$procs"
port=${MASTER_PORT:-$(mmldlm_module mmldlm.utils.network)}
mmldlm_torchrun_options
exec torchrun --nnodes 1 --nproc_per_node "$procs" --master_addr 127.0.0.1 --master_port "$port" "${MMLDLM_TORCHRUN[@]}" \
    -m mmldlm.train "${MMLDLM_ARGS[@]}" "$@"
