#!/usr/bin/env bash
# From an empty checkout to a model of images and captions:  bash launchers/quickstart_images.sh
#
# Install, draw letters of ten faces with their Unicode names, train an MMDiT in both directions under DeepSpeed ZeRO-2
# on two ranks, convert the ZeRO checkpoint to one safetensors file, and evaluate on letters that were never seen in that
# style. About 15 minutes on two CPU cores after the installation. If it is interrupted, run it again to continue.
#
#   OUT           output folder                                                   (default: runs/quickstart-images)
#   STEPS         optimizer steps                                                 (default: those of the preset)
#   NPROC         ranks                                                           (default: 2, or 1 where there is one GPU)
# Arguments are config overrides, for example training.num_train_steps=5000
set -euo pipefail
[ -z "${OUT:-}" ] || OUT=$(realpath -m -- "$OUT")
cd "$(dirname "$0")/.."
. launchers/_quickstart.sh

out=${OUT:-runs/quickstart-images}
store=$out/store
mkdir -p "$out"

step "1/6 prepare: glyphs -> $store"
prepare_once glyphs

step "2/6 train: DeepSpeed ZeRO-2"
mmldlm train --nproc "$NPROC" --config-name image_text_quick --deepspeed_config ds_configs/zero2.json \
    data.latent_data_root="$store" logging.save_dir="$out" logging.run_name=run training.resume=auto \
    ${STEPS:+training.num_train_steps="$STEPS"} "${alone[@]}" "$@"

end_if_evaluated --images

step "3/6 convert: ZeRO checkpoint -> one safetensors file"
mmldlm convert "$out/run/latest" "$out/model" --force

step "4/6 ZeRO-0, 1, 2, 3 against one process"
"$PYTHON" benchmarks/zero_parity.py --quick --data "$store" --json "$out/parity.json" task=image_text

step "5/6 evaluate on letters unseen in their style"
mmldlm evaluate --checkpoint "$out/model" --data "$store" --json "$out/evaluation.json" --html "$out/evaluation.html"

step "6/6 draw some of them"
mmldlm sample t2i --checkpoint "$out/model" --data "$store" --num-samples 40 --output-dir "$out/samples" --overwrite \
    >"$out/samples.log"

"$PYTHON" launchers/quickstart_report.py "$out" --images --seconds $((SECONDS - installed)) \
    --setup-seconds $((installed - start))
