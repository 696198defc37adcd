#!/usr/bin/env bash
# Train with Open MPI's mpirun, from one machine over ssh or inside an allocation:
#   HOSTFILE=hostfiles/two_nodes bash launchers/mpi.sh data.latent_data_root=STORE [key=value ...]
#
#   HOSTFILE         a DeepSpeed hostfile (NAME slots=N); without it, this machine with NPROC_PER_NODE ranks
#   MASTER_ADDR      only if the first node's own name is not its address on the training network
#   MASTER_PORT      default: a free port of the first node
#   CARRY            further variables for the ranks, for example "NCCL_SOCKET_IFNAME HF_HOME": mpirun propagates none
#   CONFIG_NAME, DS_CONFIG, LEARNING_RATE ...: as in launchers/single_node.sh
#
# Ranks get their numbers from mpi4py (mmldlm/distributed/environment.py). Checkout, virtual environment and data
# must have the same path on every node.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/_env.sh"
. "$here/_launch_args.sh"

mmldlm_launch_args
command -v mpirun >/dev/null || mmldlm_fail "no mpirun in PATH" "apt-get install openmpi-bin, or load the site's MPI module"
mmldlm_env
# Not an unquoted expansion (a pattern would become file names), and names alone: bash evaluates the index in ${!name}.
read -r -d '' -a names <<<"${CARRY:-}" || true
for name in "${names[@]}"; do
    [[ $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || mmldlm_fail "CARRY names '$name'" "expected names of variables, separated by blanks"
done
if [ -n "${HOSTFILE:-}" ]; then
    mmldlm_read_hostfile
    ranks=$MMLDLM_RANKS
    # mpirun's own hostfiles allow more than DeepSpeed's; the hosts are passed by name and number.
    where=(--host "$(tr ' ' ':' <<<"$MMLDLM_NODES" | paste -sd, -)")
else
    [ "${NNODES:-1}" = 1 ] || mmldlm_fail "NNODES=$NNODES, but no HOSTFILE" "name the nodes: HOSTFILE=hostfiles/two_nodes"
    ranks=${NPROC_PER_NODE:-$(mmldlm_default_procs)}
    where=(--host "localhost:$ranks")
    mmldlm_share_cores "$ranks"
fi
mmldlm_check "$ranks" "$@"
# Inside an allocation, and with settings of its own, mpirun may start its daemons without ssh.
if [ -n "${HOSTFILE:-}" ] && [ -z "${SLURM_JOB_ID:-}${PBS_JOBID:-}${LSB_JOBID:-}${!OMPI_MCA_plm@}" ]; then
    mmldlm_check_hosts
fi
carry=()
for name in LD_LIBRARY_PATH OMP_NUM_THREADS DS_ACCELERATOR MASTER_ADDR MASTER_PORT "${names[@]}"; do
    if [ -n "${!name:-}" ]; then carry+=(-x "$name"); fi
done
[ "$(id -u)" != 0 ] || carry+=(--allow-run-as-root)
# By the path from which Open MPI derives where its daemon and libraries are on other nodes (mmldlm/cluster/launcher_commands.py).
mpirun=$(command -v mpirun)
case $mpirun in
/usr/bin/* | /bin/*) mpirun=mpirun ;;
*) [ -x "${mpirun%/*}/orted" ] || [ -x "${mpirun%/*}/prted" ] || mpirun=mpirun ;;
esac
exec "$mpirun" -np "$ranks" "${where[@]}" --bind-to none --map-by slot "${carry[@]}" \
    "$PYTHON" -u "$MMLDLM_PACKAGE/train.py" "${MMLDLM_ARGS[@]}" "$@"
