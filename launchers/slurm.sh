#!/usr/bin/env bash
#SBATCH --job-name=mmldlm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
# Train under Slurm:  sbatch launchers/slurm.sh data.latent_data_root=STORE [key=value ...]   (from the checkout's folder)
#
#   MASTER_PORT      default: a port that depends on the job, since jobs may share nodes
#   REQUEUES         how often the job may put itself back into the queue, to go on from its checkpoint (default 0)
#   CONFIG_NAME, DS_CONFIG, LEARNING_RATE ...: as in launchers/single_node.sh
#
# Nodes, tasks and time are set by the #SBATCH lines (or options of sbatch). Five minutes before the time limit Slurm sends
# SIGUSR1: the ranks save a checkpoint and exit with 5; with REQUEUES=20 the job then requeues itself and continues there, else
# add training.resume=auto to continue in another job. A job that Slurm requeues, after a node failed, continues, too.
# Once before, where there is a network, to create the virtual environment:  bash -c '. launchers/_env.sh; mmldlm_env'
set -euo pipefail
root=${SLURM_SUBMIT_DIR:-$(cd "$(dirname "$0")/.." && pwd)}
. "$root/launchers/_env.sh"
. "$root/launchers/_launch_args.sh"
[ -n "${SLURM_JOB_ID:-}" ] || mmldlm_fail "this is not a Slurm job" "start it with: sbatch launchers/slurm.sh ..."

# Usage: has_saved ARG...   (whether the run of these arguments has checkpoints; mmldlm_check reports what is wrong with them)
has_saved() {
    "$PYTHON" - "${MMLDLM_ARGS[@]}" "$@" 2>/dev/null <<'PY'
import sys
from mmldlm.checkpoints.locate import holds_checkpoints
from mmldlm.commands import config_options
from mmldlm.utils.command_parser import CommandParser
parser = CommandParser("slurm.sh", "")
config_options.add_arguments(parser)
sys.exit(not holds_checkpoints(config_options.parse_config(parser.parse(sys.argv[1:])).run_dir()))
PY
}

mmldlm_launch_args
mmldlm_count REQUEUES 0
mmldlm_same NNODES SLURM_NNODES "pass the nodes to sbatch: unset NNODES, or sbatch --nodes=${NNODES:-}"
mmldlm_same NPROC_PER_NODE SLURM_NTASKS_PER_NODE \
    "pass the ranks to sbatch: unset NPROC_PER_NODE, or sbatch --ntasks-per-node=${NPROC_PER_NODE:-}"
mmldlm_env
restarts=${SLURM_RESTART_COUNT:-0}
# A restart continues. One before the first save begins as the first start did, which training.resume may have named.
if [ "$restarts" != 0 ] && has_saved "$@"; then set -- "$@" training.resume=auto; fi
mmldlm_check "$SLURM_NTASKS" "$@"
# One address for all tasks: with its own address every task would wait for the others.
MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)}
MASTER_PORT=${MASTER_PORT:-$("$PYTHON" -c 'from mmldlm.distributed.environment import slurm_port; print(slurm_port())')}
export MASTER_ADDR MASTER_PORT
# srun does not inherit --cpus-per-task from the batch job (Slurm 22.05 and later): every rank would get one core.
export SRUN_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK:-${SLURM_CPUS_PER_TASK:-1}}
# A rank would divide the CPUs that it may use by the ranks of the node; where Slurm binds tasks, they are its own already.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SRUN_CPUS_PER_TASK}
# All five variables that DeepSpeed and torch read, from Slurm's own: tasks need no discovery.
code=0
srun --kill-on-bad-exit=1 --label bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    exec "$0" -u "$@"' "$PYTHON" "$MMLDLM_PACKAGE/train.py" "${MMLDLM_ARGS[@]}" "$@" || code=$?
# 5: interrupted, with a checkpoint saved. A job that is being cancelled is not running any more, and cannot be requeued.
if [ "$code" = 5 ] && [ "$restarts" -lt "${REQUEUES:-0}" ]; then
    echo "requeued to continue from its checkpoint (restart $((restarts + 1)) of at most $REQUEUES)"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
