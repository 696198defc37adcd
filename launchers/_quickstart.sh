# What the two quickstarts share, to be sourced after `cd` to the checkout: the environment (its set-up took from `start`
# to `installed`), the memory settings of a CPU, the ranks, and steps. The steps read `out` and `store`.

start=$SECONDS
. launchers/_env.sh
for word in "$@"; do
    [[ $word == *=* ]] || mmldlm_fail "expected config overrides (key=value), found $word" \
        "leave it out; the quickstart of images is: bash launchers/quickstart_images.sh"
done
mmldlm_leave_platform
mmldlm_env quickstart eval
installed=$SECONDS

gpus=$("$PYTHON" "$MMLDLM_PACKAGE/utils/run_module.py" mmldlm.utils.gpus)
if [ "$gpus" = 0 ]; then
    # Training allocates the same large buffers at every step: keeping them avoids page faults (a sixth of the time).
    # Not all in GLIBC_TUNABLES, which glibc truncates at the first colon for child processes.
    export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}
    export MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=268435456
fi
# The presets' batch is that of one of two ranks; a rank alone takes two of them a step, for the same result.
[ "$gpus" = 1 ] && NPROC=${NPROC:-1} || NPROC=${NPROC:-2}
alone=()
[ "$NPROC" != 1 ] || alone=(training.grad_accum_steps=2)

step() { printf '\n== %s\n' "$*"; }

# Usage: prepare_once CORPUS [OPTION...]   (a store that was prepared from something else is an error)
prepare_once() {
    local record=$out/prepared_from
    if [ -f "$store/manifest.json" ]; then
        if [ -f "$record" ] && [ "$(cat "$record")" != "$*" ]; then
            mmldlm_fail "$store was prepared from: $(cat "$record"); this call asks for: $*" \
                "name another folder with OUT, or repeat the earlier call"
        fi
        echo "already exists"
    else
        mmldlm prepare "$@" --output-dir "$store"
    fi
    echo "$*" >"$record"
}

# Usage: end_if_evaluated [OPTION...]   (shows the report of an earlier call, with the options of quickstart_report.py)
end_if_evaluated() {
    [ "$out/run/report.json" -nt "$out/run/latest/manifest.json" ] || return 0
    step "already evaluated: delete $out to start from scratch"
    exec "$PYTHON" launchers/quickstart_report.py "$out" "$@" --show
}
