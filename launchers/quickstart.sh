#!/usr/bin/env bash
# From an empty checkout to a trained model:  bash launchers/quickstart.sh
#
# Install, encode a corpus, train an MMDiT under DeepSpeed ZeRO-2 on two ranks, convert the ZeRO checkpoint to one
# safetensors file, and evaluate on unseen sentences. About 15 minutes on two CPU cores after the installation. If it is
# interrupted, run it again to continue.
#
#   CORPUS        a .txt file (one sentence a line), .jsonl, or a folder of .txt  (default: the docstrings of the
#                 installed Python packages, without a download)
#   OUT           output folder                                                   (default: runs/quickstart-<corpus>)
#   MAX_SAMPLES   sentences of the corpus to use                                  (default: 32000)
#   STEPS         optimizer steps  (default: 2000; 3900 for your own corpus, usually broader than docstrings)
#   NPROC         ranks                                                           (default: 2, or 1 where there is one GPU)
# Arguments are config overrides, for example training.num_train_steps=5000
set -euo pipefail
[ -z "${CORPUS:-}" ] || [ "$CORPUS" = docstrings ] || CORPUS=$(realpath -- "$CORPUS")
[ -z "${OUT:-}" ] || OUT=$(realpath -m -- "$OUT")
cd "$(dirname "$0")/.."
. launchers/_quickstart.sh

corpus=${CORPUS:-docstrings}
name=docstrings steps=${STEPS:-2000}
if [ "$corpus" != docstrings ]; then
    name=$(basename "$corpus")
    [ -d "$corpus" ] || name=${name%.*}
    name=$(basename "$(dirname "$corpus")")-$name
    steps=${STEPS:-3900}
fi
out=${OUT:-runs/quickstart-$name}
store=$out/store
mkdir -p "$out"

step "1/6 prepare: $corpus -> $store"
prepare_once "$corpus" --max-samples "${MAX_SAMPLES:-32000}"

step "2/6 train: DeepSpeed ZeRO-2"
mmldlm train --nproc "$NPROC" --config-name quickstart --deepspeed_config ds_configs/zero2.json \
    data.latent_data_root="$store" logging.save_dir="$out" logging.run_name=run training.resume=auto \
    training.num_train_steps="$steps" "${alone[@]}" "$@"

end_if_evaluated

step "3/6 convert: ZeRO checkpoint -> one safetensors file"
mmldlm convert "$out/run/latest" "$out/model" --force

step "4/6 ZeRO-0, 1, 2, 3 against one process"
"$PYTHON" benchmarks/zero_parity.py --quick --data "$store" --json "$out/parity.json"

step "5/6 evaluate on unseen sentences"
mmldlm evaluate --checkpoint "$out/model" --data "$store" --json "$out/evaluation.json"

few=$("$PYTHON" -c 'import json, sys; print(min(100, json.load(open(sys.argv[1]))["conditions"]["num_sentences"]))' \
    "$out/evaluation.json")
step "6/6 search the texts of $few of them with the encoder"
mmldlm evaluate --checkpoint "$out/model" --data "$store" --num-samples "$few" --control-samples 2 --search local \
    --encoder-calls 32 --json "$out/search.json" >"$out/search.log"

bounds=()
if [[ $name-$steps-$NPROC-${MAX_SAMPLES:-}-$* == docstrings-2000-[12]-- ]]; then
    # With this corpus, budget and batch (README.md). Gain and F1 compare the model with itself; a model with a worse
    # NELBO on all text would pass them.
    bounds=(--bounds 'nelbo_right<=3.45' 'gain_null>=1.55' 'f1_gap>=35' 'reencoded_cosine>=0.78' 'recall_at_1>=0.93' \
        'cosine>=0.78')
fi
"$PYTHON" launchers/quickstart_report.py "$out" --seconds $((SECONDS - installed)) \
    --setup-seconds $((installed - start)) "${bounds[@]}"
