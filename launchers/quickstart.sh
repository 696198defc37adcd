#!/usr/bin/env bash
# From an empty checkout to a trained model:  bash launchers/quickstart.sh
#
# Install, encode a corpus, train an MMDiT under DeepSpeed ZeRO-2 on two ranks, convert the ZeRO checkpoint to one
# safetensors file, and evaluate on unseen sentences. About 20 minutes on two CPU cores after the installation. If it is
# interrupted, run it again to continue.
#
#   CORPUS        a .txt file (one sentence a line), .jsonl, or a folder of .txt  (default: the docstrings of the
#                 installed Python packages, without a download)
#   OUT           output folder                                                   (default: runs/quickstart-<corpus>)
#   MAX_SAMPLES   sentences of the corpus to use                                  (default: 32000)
#   STEPS         optimizer steps  (default: 1600; 3900 for your own corpus, usually broader than docstrings)
#   NPROC         ranks                                                           (default: 2 on a CPU, else all GPUs)
# Arguments are config overrides, for example training.num_train_steps=5000
set -euo pipefail
[ -z "${CORPUS:-}" ] || [ "$CORPUS" = docstrings ] || CORPUS=$(realpath -- "$CORPUS")
cd "$(dirname "$0")/.."
start=$SECONDS
. launchers/_env.sh
mmldlm_env quickstart eval
installed=$SECONDS

corpus=${CORPUS:-docstrings}
name=$(basename "${corpus%.*}")
[ "$name" = docstrings ] || name=$(basename "$(dirname "$corpus")")-$name
[ "$name" = docstrings ] && steps=${STEPS:-1600} || steps=${STEPS:-3900}
out=${OUT:-runs/quickstart-$name}
store=$out/store
mkdir -p "$out"

if ! nvidia-smi -L >/dev/null 2>&1; then
    NPROC=${NPROC:-2}
    # Training allocates the same large buffers at every step: keeping them avoids page faults (a sixth of the time).
    # Not all in GLIBC_TUNABLES, which glibc truncates at the first colon for child processes.
    export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}
    export MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=268435456
fi

step() { printf '\n== %s\n' "$*"; }

step "1/5 prepare: $corpus -> $store"
if [ -f "$store/manifest.json" ]; then
    echo "already exists"
else
    mmldlm prepare "$corpus" --output-dir "$store" --max-samples "${MAX_SAMPLES:-32000}"
fi

step "2/5 train: DeepSpeed ZeRO-2"
mmldlm train ${NPROC:+--nproc "$NPROC"} --config-name quickstart --deepspeed_config ds_configs/zero2.json \
    data.latent_data_root="$store" logging.save_dir="$out" logging.run_name=run training.resume=auto \
    training.num_train_steps="$steps" "$@"

if [ "$out/run/report.json" -nt "$out/run/latest/manifest.json" ]; then
    step "already evaluated: delete $out to start from scratch"
    exec "$PYTHON" launchers/quickstart_report.py "$out" --show
fi

step "3/5 convert: ZeRO checkpoint -> one safetensors file"
mmldlm convert "$out/run/latest" "$out/model" --force

step "4/5 ZeRO-0, 1, 2, 3 against one process"
"$PYTHON" benchmarks/zero_parity.py --quick --data "$store" --json "$out/parity.json"

step "5/5 evaluate on unseen sentences"
mmldlm evaluate --checkpoint "$out/model" --data "$store" --json "$out/evaluation.json"

bounds=()
if [ "$name-$steps-${NPROC:-}-${MAX_SAMPLES:-}-$*" = docstrings-1600-2-- ]; then
    # With this corpus, budget and batch (README.md). Gain and F1 compare the model with itself; a model with a worse
    # NELBO on all text would pass them.
    bounds=(--bounds 'nelbo_right<=3.45' 'gain_null>=1.55' 'f1_gap>=35' 'reencoded_cosine>=0.78' 'recall_at_1>=0.93' \
        'cosine>=0.78')
fi
"$PYTHON" launchers/quickstart_report.py "$out" --seconds $((SECONDS - installed)) \
    --setup-seconds $((installed - start)) "${bounds[@]}"
