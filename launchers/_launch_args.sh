# Convert MM-LDLM's environment variables to arguments of mmldlm/train.py, in the array MMLDLM_ARGS.
# To be sourced after launchers/_env.sh. Arguments on the launcher's command line come later and win.

mmldlm_launch_args() {
    local name key
    mmldlm_refuse_old_names || return
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

# MM-LDLM's variables with other names here: they are not read, so the run would not be the intended one.
mmldlm_refuse_old_names() {
    local name fix
    for name in "${!L2T_@}"; do
        [ -n "${!name}" ] || continue
        case $name in
        L2T_CONFIG) fix="CONFIG_NAME=${!name}" ;;
        L2T_RUN_NAME) fix="use the argument logging.run_name=${!name}" ;;
        L2T_SAVE_DIR) fix="use the argument logging.save_dir=${!name}" ;;
        L2T_TRAIN_BS) fix="use the argument training.train_batch_size=${!name}" ;;
        L2T_EVAL_BS) fix="use the argument training.eval_batch_size=${!name}" ;;
        L2T_COMPILE) fix="use the argument training.compile_model=${!name}" ;;
        *) fix="use an argument section.key=value (mmldlm config --keys lists them)" ;;
        esac
        mmldlm_fail "$name is a variable of MM-LDLM that is not read here" "unset $name; $fix"
        return
    done
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

# Usage: mmldlm_hostfile   (prints "NAME SLOTS" of every node of $HOSTFILE)
mmldlm_hostfile() {
    [ -r "$HOSTFILE" ] && [ -f "$HOSTFILE" ] ||
        { mmldlm_fail "HOSTFILE=$HOSTFILE cannot be read" "see hostfiles/ for examples"; return; }
    sed -nE 's/^[[:space:]]*([^#[:space:]]+)[[:space:]]+slots=([0-9]+)[[:space:]]*$/\1 \2/p' "$HOSTFILE"
}

# Usage: mmldlm_read_hostfile   Sets MMLDLM_NODES ("NAME SLOTS" lines) and MMLDLM_RANKS; other variables must agree.
mmldlm_read_hostfile() {
    local nodes slots
    MMLDLM_NODES=$(mmldlm_hostfile) || return
    [ -n "$MMLDLM_NODES" ] || { mmldlm_fail "$HOSTFILE names no node" "write one 'name slots=N' per line"; return; }
    nodes=$(wc -l <<<"$MMLDLM_NODES")
    MMLDLM_RANKS=$(($(cut -d ' ' -f 2 <<<"$MMLDLM_NODES" | paste -sd+ -)))
    [ "$MMLDLM_RANKS" -gt 0 ] || { mmldlm_fail "$HOSTFILE has no slots" "write one 'name slots=N' per line"; return; }
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

# Print the number of GPUs, or 1 without a GPU.
mmldlm_default_procs() {
    local gpus=0
    if command -v nvidia-smi >/dev/null; then gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true); fi
    echo $((gpus > 0 ? gpus : 1))
}

# Divide the cores of a node among its ranks; by default each rank would start one thread per core.
mmldlm_share_cores() {
    local cores
    cores=$(getconf _NPROCESSORS_ONLN)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > $1 ? cores / $1 : 1))}
}
