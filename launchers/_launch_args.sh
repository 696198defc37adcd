# Convert MM-LDLM's environment variables to arguments of mmldlm/train.py, in the array MMLDLM_ARGS.
# To be sourced after launchers/_env.sh. Arguments on the launcher's command line come later and win.

mmldlm_launch_args() {
    local name key
    mmldlm_same LEARNING_RATE OPTIMIZER_LR "both set optimizer.lr: keep one" || return
    mmldlm_count NPROC_PER_NODE 1 || return
    mmldlm_count MASTER_PORT 1 || return
    MMLDLM_ARGS=(--config-name "${CONFIG_NAME:-mmdit_stable}")
    if [ -n "${DS_CONFIG:-}" ]; then
        [ -r "$DS_CONFIG" ] || { mmldlm_fail "DS_CONFIG=$DS_CONFIG cannot be read" "see ds_configs/"; return; }
        MMLDLM_ARGS+=(--deepspeed_config "$DS_CONFIG")
    fi
    while read -r name key; do
        if [ -n "${!name:-}" ]; then MMLDLM_ARGS+=("$key=${!name}"); fi
    done <<'KEYS'
LEARNING_RATE optimizer.lr
OPTIMIZER_LR optimizer.lr
GRAD_CLIP_NORM optimizer.grad_clip_norm
WARMUP_STEPS optimizer.warmup_steps
LATENT_LOSS_WEIGHT loss.latent_loss_weight
GRAD_ACCUM_STEPS training.grad_accum_steps
LATENT_DIM model.latent_dim
DTYPE training.dtype
KEYS
}

# Usage: mmldlm_same NAME OTHER FIX   (two variables with one meaning)
mmldlm_same() {
    if [ -n "${!1:-}" ] && [ -n "${!2:-}" ] && [ "${!1}" != "${!2}" ]; then
        mmldlm_fail "$1=${!1} and $2=${!2} disagree" "$3"
    fi
}

# Usage: mmldlm_count NAME MINIMUM
mmldlm_count() {
    local value=${!1:-$2}
    if ! [[ $value =~ ^[0-9]{1,9}$ ]] || [ "$value" -lt "$2" ]; then
        mmldlm_fail "$1=$value" "expected an integer >= $2"
    fi
}

# Usage: mmldlm_module MODULE ARG...   Run a module of this checkout; the working folder is not on its path.
mmldlm_module() {
    "$PYTHON" "$MMLDLM_PACKAGE/utils/run_module.py" "$@"
}

# Usage: mmldlm_read_hostfile   (after mmldlm_env)
# Sets MMLDLM_NODES ("NAME SLOTS" lines) and MMLDLM_RANKS; other variables must agree. The reader is that of
# `mmldlm launch`: a line that DeepSpeed or mpirun would read differently stops the script.
mmldlm_read_hostfile() {
    local nodes slots name
    [ -r "$HOSTFILE" ] && [ -f "$HOSTFILE" ] ||
        { mmldlm_fail "HOSTFILE=$HOSTFILE cannot be read" "see hostfiles/ for examples"; return; }
    MMLDLM_NODES=$(mmldlm_module mmldlm.cluster.hostfile "$HOSTFILE") || return
    nodes=$(wc -l <<<"$MMLDLM_NODES")
    MMLDLM_RANKS=0
    while read -r name slots; do MMLDLM_RANKS=$((MMLDLM_RANKS + slots)); done <<<"$MMLDLM_NODES"
    if [ -n "${NNODES:-}" ] && [ "$NNODES" != "$nodes" ]; then
        mmldlm_fail "NNODES=$NNODES, but $HOSTFILE names $nodes node(s)" "unset NNODES: the hostfile defines it"
        return
    fi
    if [ -n "${NODE_RANK:-}" ]; then
        mmldlm_fail "HOSTFILE (all nodes, started from this one) and NODE_RANK=$NODE_RANK (this node alone)" "unset one of them"
        return
    fi
    slots=$(cut -d ' ' -f 2 <<<"$MMLDLM_NODES" | sort -u | paste -sd, -)
    if [ -n "${NPROC_PER_NODE:-}" ] && [ "$NPROC_PER_NODE" != "$slots" ]; then
        mmldlm_fail "NPROC_PER_NODE=$NPROC_PER_NODE, but $HOSTFILE has slots=$slots" "unset NPROC_PER_NODE: the hostfile defines it"
        return
    fi
}

# Check config and data before any rank starts: an error is one message and exit code 2.
# Usage: mmldlm_check NUM_RANKS ARG...
mmldlm_check() {
    local ranks=$1
    shift
    mmldlm config --check --world-size "$ranks" "${MMLDLM_ARGS[@]}" "$@" >/dev/null
}

# Check over ssh that every node of the hostfile answers and has this checkout and Python, as `mmldlm launch` does: a launcher
# waits for a missing node until its time limit.
# Usage: mmldlm_check_hosts SSH_OPTION...   (after mmldlm_read_hostfile)
mmldlm_check_hosts() {
    local report
    report=$(mmldlm_module mmldlm.preflight --level 1 --only SSH001,SSH002,SSH003,SSH004,SSH005,PY001,PY002 \
        --hostfile "$HOSTFILE" "${@/#/--ssh-option=}" 2>&1) || { printf '%s\n' "$report" >&2; return 2; }
}

# DeepSpeed pastes the master address and some variables into a shell line for every node, where they would be evaluated.
mmldlm_refuse_shell_text() {
    local name
    for name in MASTER_ADDR "${!NCCL@}" "${!PYTHON@}" "${!MV2@}" "${!UCX@}" "${!MLFLOW@}"; do
        case ${!name:-} in
        *[\$\`\\\"\;\&\|\<\>\(\)]* | *$'\n'*)
            mmldlm_fail "$name has characters that a shell evaluates" \
                "use plain text: DeepSpeed passes it through the shell of each node (mmldlm launch does not)"
            return
            ;;
        esac
    done
}

# Keep the working folder off the path of a launcher and its ranks, where its modules would replace those of Python and of
# the packages (heeded since Python 3.11; ranks find a task of the user in the working folder all the same).
export PYTHONSAFEPATH=1

# Set MMLDLM_TORCHRUN: options of torchrun for signals. By default it kills its ranks 30 seconds after a signal, which a save
# may exceed, dies of SIGUSR1 (Slurm's warning) without them, and handles SIGHUP even under nohup. A signal that is ignored
# here stays ignored.
mmldlm_torchrun_options() {
    local name signals=()
    for name in SIGTERM SIGINT SIGQUIT SIGUSR1 SIGHUP; do
        [ -n "$(trap -p "$name")" ] || signals+=("$name")
    done
    MMLDLM_TORCHRUN=(--shutdown-timeout 86400)
    [ ${#signals[@]} -eq 0 ] || MMLDLM_TORCHRUN+=(--signals-to-handle "$(IFS=,; echo "${signals[*]}")")
}

# Print the number of GPUs that CUDA_VISIBLE_DEVICES leaves here, or 1 without a GPU.   (after mmldlm_env)
mmldlm_default_procs() {
    local gpus
    gpus=$(mmldlm_module mmldlm.utils.gpus) || return
    echo $((gpus > 0 ? gpus : 1))
}

# Divide the cores that this job may use among its ranks; by default each rank would start one thread per core.
# Usage: mmldlm_share_cores RANKS   (after mmldlm_env)
mmldlm_share_cores() {
    local cores
    [ -z "${OMP_NUM_THREADS:-}" ] || return 0
    cores=$(mmldlm_module mmldlm.utils.resources) || return
    export OMP_NUM_THREADS=$((cores > 10#$1 ? cores / 10#$1 : 1))
}
