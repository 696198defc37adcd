"""The names of the files in a run's folder, and what each of them holds."""

from __future__ import annotations

CONFIG = "config.yaml"
STEPS = "training_log.jsonl"
EVALUATIONS = "eval_log.jsonl"
SAMPLES = "samples.jsonl"
SAMPLED_IMAGES = "samples"
EVENTS = "events.jsonl"
LAYERS = "gradient_log.jsonl"
LOGS = "logs"
LATEST_LOG = "latest.log"
PREFLIGHT = "preflight.json"
PASSING_NODES = "passing_nodes.txt"
REPORT = "report.html"
PLOTS = "plots"
PROFILE = "profile"
FORENSICS = "forensics"
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"
LATEST, LAST_BEST = "latest", "last_best"
SAVE_REQUEST = "save_now"
LOCK = ".lock"

# In a name, N stands for a number, DATE for a date with the time of day, and a name that ends
# with / is a folder.
RUN_FILES = {
    CONFIG: "the config as it ran; `--config RUN/config.yaml` repeats it",
    STEPS: "one JSON object per step; a value that is not finite is `null`, next to a reason",
    EVALUATIONS: "the figures of each evaluation",
    SAMPLES: (
        "at each evaluation, what the model makes of `logging.eval_samples` validation samples"
    ),
    f"{SAMPLED_IMAGES}/step_N_N.png": "the images among them",
    EVENTS: (
        "skipped steps, bad samples, spikes, rollbacks, saves, signals; its last line says how the"
        " run ended"
    ),
    LAYERS: "figures of each layer, with `logging.layer_stats_freq=N`",
    f"{LOGS}/train_DATE_nodeN.log": "the lines of the screen with timestamps",
    f"{LOGS}/{LATEST_LOG}": "a link to the newest of these: `tail -f RUN/logs/latest.log`",
    f"{LOGS}/launch_DATE/": "with `mmldlm launch`: one log per rank, and the launcher's",
    f"{LOGS}/stack_rankN.txt": "stacks of all threads, if a rank stalled or died",
    f"{LOGS}/error_rankN.txt": "then, the error of a rank that waited for it",
    f"{LOGS}/flight_rank_N": (
        "then, under NCCL, the last 2,000 collectives of each rank: torch's flight recorder, which"
        " `torchfrtrace` reads; `TORCH_FR_BUFFER_SIZE=0` turns it off"
    ),
    PREFLIGHT: "the receipt of the last preflight: what was measured on which node",
    PASSING_NODES: "the nodes without a failed check, as a hostfile",
    REPORT: "the page of `mmldlm report RUN`; it needs no network",
    f"{PLOTS}/loss.png": (
        "the loss curves, drawn at the end (not of a stopped run) and by `mmldlm plot RUN`"
    ),
    f"{PROFILE}/steps_N_N_rankN.json": "the trace of `training.profile`, for ui.perfetto.dev",
    f"{PROFILE}/memory_rankN.pickle": (
        "with `training.memory_snapshot`, the allocations of a GPU that ran out of memory, for"
        " pytorch.org/memory_viz"
    ),
    f"{FORENSICS}/step_N.json": "what `mmldlm replay` needs of a skipped step",
    f"{TENSORBOARD}/": "event files of the tracker `tensorboard`",
    "wandb/": "the record of the tracker `wandb`, which `wandb sync` uploads",
    "wandb_id": "the name by which a resumed run continues that record",
    f"{CHECKPOINTS}/step_N/": "a checkpoint",
    LATEST: "a link to the newest checkpoint",
    LAST_BEST: "a link to the best one, with `checkpoints.keep_best=FIGURE`",
    SAVE_REQUEST: "made by hand (`touch RUN/save_now`), it asks for a checkpoint at once",
    LOCK: "the job that trains in this folder",
}
"""Names of a run's files, and what they hold, in Markdown."""
