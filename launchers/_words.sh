# Turns the environment that MM-LDLM's users know into arguments of mmldlm/train.py, in the array MMLDLM_WORDS.
# To be sourced after launchers/_env.sh. Words given on the launcher's command line come later and win.

mmldlm_words() {
    local name key
    MMLDLM_WORDS=(--config-name "${CONFIG_NAME:-mmdit_stable}")
    if [ -n "${DS_CONFIG:-}" ]; then
        [ -r "$DS_CONFIG" ] || { mmldlm_fail "DS_CONFIG=$DS_CONFIG cannot be read" "see ds_configs/"; return; }
        MMLDLM_WORDS+=(--deepspeed_config "$DS_CONFIG")
    fi
    while read -r name key; do
        [ -n "${!name:-}" ] && MMLDLM_WORDS+=("$key=${!name}")
    done <<'WORDS'
LEARNING_RATE optimizer.lr
OPTIMIZER_LR optimizer.lr
GRAD_CLIP_NORM optimizer.grad_clip_norm
WARMUP_STEPS optimizer.warmup_steps
LATENT_LOSS_WEIGHT loss.latent_loss_weight
GRAD_ACCUM_STEPS training.grad_accum_steps
LATENT_DIM model.latent_dim
DTYPE training.dtype
WORDS
    if [ -n "${LEARNING_RATE:-}" ] && [ -n "${OPTIMIZER_LR:-}" ] && [ "$LEARNING_RATE" != "$OPTIMIZER_LR" ]; then
        mmldlm_fail "LEARNING_RATE=$LEARNING_RATE and OPTIMIZER_LR=$OPTIMIZER_LR disagree" "both set optimizer.lr: keep one"
    fi
}

# Finds mistakes in the config before any rank starts, where they are one message and exit code 2.
# Usage: mmldlm_check NUM_RANKS WORD...
mmldlm_check() {
    local ranks=$1
    shift
    mmldlm config --world-size "$ranks" "${MMLDLM_WORDS[@]}" "$@" >/dev/null
}

# Prints one process for each GPU, or one where there is none.
mmldlm_default_procs() {
    local gpus=0
    if command -v nvidia-smi >/dev/null; then gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true); fi
    echo $((gpus > 0 ? gpus : 1))
}

# The processes of a node share its cores; without a number each would start a thread for every core.
mmldlm_share_cores() {
    local cores
    cores=$(getconf _NPROCESSORS_ONLN)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > $1 ? cores / $1 : 1))}
}
