#!/usr/bin/env bash
# Train on several machines, in one of two ways.
#
# From one of them, over ssh (needs pdsh and ssh keys):
#   HOSTFILE=hostfiles/two_nodes MASTER_ADDR=10.0.0.1 bash launchers/multi_node.sh data.latent_data_root=STORE [key=value ...]
# On each of them (a cluster that starts one command a node):
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 NPROC_PER_NODE=8 bash launchers/multi_node.sh data.latent_data_root=STORE ...
#
#   MASTER_ADDR      address of node 0 (the hostfile's first node) that all nodes reach. Always given: a node cannot
#                    guess it, and each taking its own address leaves every node waiting for the others.
#   MASTER_PORT      default 29500
#   NODE_RANK        this node's number, from 0 (RANK is read where NODE_RANK is not set)
#   NPROC_PER_NODE   ranks a node (default: one for each GPU, or 1); with HOSTFILE its slots say it
#   CONFIG_NAME, DS_CONFIG, LEARNING_RATE ...: as in launchers/single_node.sh
#
# Checkout, virtual environment and data lie at the same path on every node: on a shared file system, or set up on each.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/_env.sh"
. "$here/_words.sh"

mmldlm_words
port=${MASTER_PORT:-29500}

if [ -n "${HOSTFILE:-}" ]; then
    # DeepSpeed takes a missing hostfile for a local run, so it is looked at here.
    mmldlm_read_hostfile
    if grep -qE '^(localhost|127\.0\.0\.1)[[:space:]]' "$HOSTFILE"; then
        # This machine alone: no ssh to itself, which DeepSpeed would try first.
        how=(--no_ssh_check)
        MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
    else
        # A hostfile of one node DeepSpeed would run here, whatever machine it names.
        how=(--force_multi)
    fi
    if [ -z "${MASTER_ADDR:-}" ]; then
        mmldlm_fail "MASTER_ADDR is not set" "give the first node's address as the other nodes reach it"
    fi
    mmldlm_env
    mmldlm_check "$MMLDLM_RANKS" "$@"
    exec deepspeed --hostfile "$HOSTFILE" "${how[@]}" --no_local_rank --master_addr "$MASTER_ADDR" --master_port "$port" \
        "$MMLDLM_ROOT/mmldlm/train.py" "${MMLDLM_WORDS[@]}" "$@"
fi

nnodes=${NNODES:-}
mmldlm_same NODE_RANK RANK "both give this node's number: unset RANK"
node_rank=${NODE_RANK:-${RANK:-}}
[ -n "$nnodes" ] || mmldlm_fail "neither HOSTFILE nor NNODES is set" "the top of launchers/multi_node.sh shows both ways"
mmldlm_count NNODES 1
if [ "$nnodes" -gt 1 ]; then
    [ -n "${MASTER_ADDR:-}" ] || mmldlm_fail "MASTER_ADDR is not set" "give node 0's address, the same on every node"
    [ -n "$node_rank" ] || mmldlm_fail "NODE_RANK is not set" "give each node its number, 0 to $((nnodes - 1))"
fi
if ! [[ ${node_rank:-0} =~ ^[0-9]{1,9}$ ]] || [ "${node_rank:-0}" -ge "$nnodes" ]; then
    mmldlm_fail "node number $node_rank of NNODES=$nnodes" "give each node its number, 0 to $((nnodes - 1)), in NODE_RANK"
fi
mmldlm_env
procs=${NPROC_PER_NODE:-$(mmldlm_default_procs)}
mmldlm_check $((nnodes * procs)) "$@"
mmldlm_share_cores "$procs"
exec torchrun --nnodes "$nnodes" --node_rank "${node_rank:-0}" --nproc_per_node "$procs" \
    --master_addr "${MASTER_ADDR:-127.0.0.1}" --master_port "$port" -m mmldlm.train "${MMLDLM_WORDS[@]}" "$@"
