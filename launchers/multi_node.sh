#!/usr/bin/env bash
# Train on several machines, in one of two ways.
#
# From one of them, over ssh (needs pdsh and ssh keys):
#   HOSTFILE=hostfiles/two_nodes MASTER_ADDR=10.0.0.1 bash launchers/multi_node.sh data.latent_data_root=STORE [key=value ...]
# On each of them (a cluster that starts one command per node):
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 NPROC_PER_NODE=8 bash launchers/multi_node.sh data.latent_data_root=STORE ...
#
#   MASTER_ADDR      address of node 0 (the hostfile's first node) that all nodes reach. Required: a node cannot guess it,
#                    and with its own address every node would wait for the others.
#   MASTER_PORT      default 29500
#   NODE_RANK        this node's number, from 0 (default: RANK)
#   NNODES           number of nodes (default: WORLD_SIZE in a shell with RANK and without LOCAL_RANK: Kubernetes' operators
#                    number the nodes so)
#   NPROC_PER_NODE   ranks per node (default: its GPUs, or 1); with HOSTFILE its slots
#   CONFIG_NAME, DS_CONFIG, LEARNING_RATE ...: as in launchers/single_node.sh
#
# Checkout, virtual environment and data must have the same path on every node: shared, or installed on each. With a Python of
# an environment module, name its libraries in ./.deepspeed_env (LD_LIBRARY_PATH=...): DeepSpeed passes no other (mmldlm launch does).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/_env.sh"
. "$here/_launch_args.sh"

mmldlm_launch_args
port=${MASTER_PORT:-29500}

if [ -n "${HOSTFILE:-}" ]; then
    mmldlm_env
    # DeepSpeed treats a missing hostfile as a local run, so it is checked here.
    mmldlm_read_hostfile
    case ${MMLDLM_NODES%% *} in
    localhost | 127.0.0.1)
        # This machine alone, by torchrun below: a signal would end DeepSpeed's launcher here without its ranks.
        mmldlm_leave_platform
        NNODES=1 NPROC_PER_NODE=$MMLDLM_RANKS HOSTFILE=
        ;;
    *)
        mmldlm_refuse_shell_text
        ;;
    esac
fi

if [ -n "${HOSTFILE:-}" ]; then
    if [ -z "${MASTER_ADDR:-}" ]; then
        mmldlm_fail "MASTER_ADDR is not set" "set it to the address of the first node that the other nodes reach"
    fi
    mmldlm_check "$MMLDLM_RANKS" "$@"
    read -r -d '' -a ssh_options <<<"${PDSH_SSH_ARGS_APPEND:-}" || true
    mmldlm_check_hosts "${ssh_options[@]}"
    # DeepSpeed pastes the arguments into a shell line for each node: what is not plain text is passed encoded.
    mapfile -t script < <(mmldlm_module mmldlm.cluster.run_decoded --encode "$MMLDLM_PACKAGE/train.py" "${MMLDLM_ARGS[@]}" "$@")
    # DeepSpeed would run a hostfile of one node here, whatever machine it names, without --force_multi.
    exec deepspeed --hostfile "$HOSTFILE" --force_multi --no_local_rank --master_addr "$MASTER_ADDR" --master_port "$port" \
        "${script[@]}"
fi

if [ -z "${NNODES:-}" ] && [ -n "${RANK:-}" ] && [ -n "${WORLD_SIZE:-}" ] && [ -z "${LOCAL_RANK:-}" ]; then
    NNODES=$WORLD_SIZE
    echo "RANK=$RANK and WORLD_SIZE=$WORLD_SIZE number the nodes of a platform: this is node $RANK of $NNODES" >&2
fi
nnodes=${NNODES:-}
mmldlm_same NODE_RANK RANK "both give this node's number: unset RANK"
node_rank=${NODE_RANK:-${RANK:-}}
unset RANK WORLD_SIZE # torchrun sets those of the ranks
[ -n "$nnodes" ] || mmldlm_fail "neither HOSTFILE nor NNODES is set" "the top of launchers/multi_node.sh shows both ways"
mmldlm_count NNODES 1
nnodes=$((10#$nnodes))
if [ "$nnodes" -gt 1 ]; then
    [ -n "${MASTER_ADDR:-}" ] || mmldlm_fail "MASTER_ADDR is not set" "set it to node 0's address, the same on every node"
    [ -n "$node_rank" ] || mmldlm_fail "NODE_RANK is not set" "set it on each node to its number, 0 to $((nnodes - 1))"
fi
if ! [[ ${node_rank:-0} =~ ^[0-9]{1,9}$ ]] || [ "${node_rank:-0}" -ge "$nnodes" ]; then
    mmldlm_fail "node number $node_rank of NNODES=$nnodes" "set NODE_RANK on each node to its number, 0 to $((nnodes - 1))"
fi
mmldlm_env
procs=${NPROC_PER_NODE:-$(mmldlm_default_procs)}
mmldlm_check $((nnodes * 10#$procs)) "$@"
mmldlm_share_cores "$procs"
mmldlm_torchrun_options
[ "$nnodes" = 1 ] ||
    echo "node $node_rank of $nnodes: torchrun waits for all nodes at $MASTER_ADDR:$port" >&2
exec torchrun --nnodes "$nnodes" --node_rank "${node_rank:-0}" --nproc_per_node "$procs" \
    --master_addr "${MASTER_ADDR:-127.0.0.1}" --master_port "$port" "${MMLDLM_TORCHRUN[@]}" \
    -m mmldlm.train "${MMLDLM_ARGS[@]}" "$@"
