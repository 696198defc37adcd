"""The options of `mmldlm sample`: which kind of samples reads which, with what default, and their
help.
"""

from __future__ import annotations

from typing import Any

from mmldlm.inference.search import ARGUMENTS as SEARCH_ARGUMENTS
from mmldlm.sampling.records import MAX_TEXTS
from mmldlm.sampling.settings import ETAS, SOLVERS
from mmldlm.sampling.strategies import STRATEGIES
from mmldlm.utils import option_types

IMAGE_STEPS = 20
"""Default number of denoising steps of an image.

One, which is enough for an embedding, gives a blur.
"""
IMAGE_GUIDANCE = 2.0
NUM_LENGTHS = 3
"""Number of lengths in which a caption is written: the model reads the length from the mean patch
alone.
"""

KINDS = {
    "l2t": "text from embeddings",
    "t2l": "embeddings from text",
    "unconditional": "text and embeddings without a condition",
    "t2i": "images from captions",
    "i2t": "captions from images",
    "joint": "images and captions without a condition",
}
IMAGE_KINDS = {"t2i": "t2l", "i2t": "l2t", "joint": "unconditional"}
"""Kind of samples of a model of images -> the kind whose model and samplers it shares."""
# Options that not every kind reads, and their defaults in the kinds that do.
DEFAULTS: dict[str, dict[str, Any]] = {
    "image": {"i2t": None},
    "vae": {"t2i": None, "i2t": None, "joint": None},
    "image_size": {"t2i": None, "i2t": None, "joint": None},
    "latent_file": {"l2t": None},
    "data": {"l2t": None, "t2i": None},
    "text": {"l2t": None, "t2l": None},
    "text_file": {"l2t": None, "t2l": None},
    "num_samples": {"l2t": None, "unconditional": 10, "t2i": None},
    "num_steps": {"l2t": 64, "t2l": None, "unconditional": 64, "t2i": IMAGE_STEPS},
    "sampler": {"l2t": None, "unconditional": None, "t2i": None},
    "temperature": {"l2t": None, "unconditional": None, "t2i": None},
    "top_p": {"l2t": 1.0, "unconditional": 1.0, "t2i": 1.0},
    "guidance": {"l2t": 1.0, "t2l": 1.0, "t2i": IMAGE_GUIDANCE},
    "guidance_interval": {"t2l": None, "t2i": None},
    "presence_penalty": {"l2t": None, "i2t": 0.0},
    "spacing": {"l2t": None, "unconditional": None},
    "distinct": {"l2t": None, "unconditional": None},
    "threshold": {"l2t": None, "unconditional": None},
    "num_beams": {"l2t": None, "unconditional": None},
    "method": {"t2l": "ddim", "unconditional": None},
    "solver": {"unconditional": "ddim"},
    "condition_timestep": {"l2t": 0.0, "unconditional": 0.0},
    "eta": {"t2l": 0.0},
    "trace": {"l2t": None, "unconditional": None},
    **{key: {"l2t": None} for key in SEARCH_ARGUMENTS},
}
# Options of l2t that need an encoder of texts.
_NOT_OF_IMAGES = ("text", "text_file", *SEARCH_ARGUMENTS)
for _key, _defaults in DEFAULTS.items():
    for _word, _kind in IMAGE_KINDS.items():
        if _kind in _defaults and not (_word == "i2t" and _key in _NOT_OF_IMAGES):
            _defaults.setdefault(_word, _defaults[_kind])
# Options that a task may lack, also in a kind that it has (TextTask.sampling_options).
TASK_OPTIONS = (
    "num_steps",
    "sampler",
    "temperature",
    "top_p",
    "guidance",
    "presence_penalty",
    "num_beams",
    "method",
    "solver",
    "eta",
    "condition_timestep",
    "spacing",
    "distinct",
    "threshold",
    "guidance_interval",
)
JOINT_METHODS = ("joint", "chain")


METHODS = {"t2l": SOLVERS, "t2i": SOLVERS, "unconditional": JOINT_METHODS, "joint": JOINT_METHODS}


def eta_value(word: str) -> float | str:
    return word if word in ETAS else option_types.number(0, 1)(word)


# argparse settings of the same options.
OPTIONS: dict[str, dict[str, Any]] = {
    "image": {
        "type": option_types.path,
        "nargs": "+",
        "metavar": "FILE",
        "help": "images, read as `mmldlm prepare` reads them",
    },
    "vae": {
        "type": option_types.path,
        "metavar": "FOLDER",
        "help": "of images as vae:NAME: folder of the autoencoder (default: as prepared)",
    },
    "image_size": {
        "type": option_types.count,
        "metavar": "PIXELS",
        "help": (
            "side of the images, of a model of several sizes (default: that of --data, else the"
            " largest)"
        ),
    },
    "latent_file": {
        "type": option_types.path,
        "metavar": "X.npy",
        "help": "embeddings [D] or [N, D] in the encoder's space",
    },
    "data": {
        "type": option_types.path,
        "metavar": "STORE",
        "help": "validation samples of a store: embeddings, images, or (t2i) captions",
    },
    "text": {
        "nargs": "+",
        "metavar": "TEXT",
        "help": "texts (l2t: embedded with the encoder of the training data)",
    },
    "text_file": {"type": option_types.path, "metavar": "FILE", "help": "texts, one per line"},
    "num_samples": {
        "type": option_types.integer(1, 1 << 24),
        "metavar": "N",
        "help": (
            "number of samples (l2t: default one per embedding; i2t, t2i: one per image, caption)"
        ),
    },
    "num_steps": {
        "type": option_types.count,
        "help": (
            "denoising steps (t2l: default 1, or 10 for a model that predicts epsilon; t2i of a"
            " model that masks: 12); a text of n tokens takes at most n passes"
        ),
    },
    "sampler": {
        "help": (
            f"text sampler; of masked diffusion {' or '.join(STRATEGIES)} (default: l2t"
            " confidence, unconditional ancestral); a name that the model's task lacks is refused"
            " with those that it has"
        )
    },
    "temperature": {
        "type": option_types.number(0),
        "help": (
            "0 takes the most probable token (default: 0 for samplers by certainty, or 1 if an"
            " embedding is used several times; 1 for the others)"
        ),
    },
    "top_p": {"type": option_types.number(1e-6, 1), "help": "nucleus of the token draws"},
    "guidance": {
        "type": option_types.number(),
        "help": "scale of classifier-free guidance, 1: none",
    },
    "guidance_interval": {
        "nargs": 2,
        "type": option_types.number(),
        "metavar": ("LOW", "HIGH"),
        "help": "guide only at timesteps (1 noise, 0 data) from LOW to HIGH (default: at all)",
    },
    "presence_penalty": {
        "type": option_types.number(),
        "help": (
            "nats subtracted from tokens that the text already contains (default: 1 for samplers"
            " by certainty, else 0)"
        ),
    },
    "spacing": {
        "type": option_types.number(0),
        "metavar": "G",
        "help": (
            "of the positions that a pass would fill, one nearer than G x the masked share to a"
            " surer one waits (samplers by certainty; default 1: none)"
        ),
    },
    "distinct": {
        "action": "store_const",
        "const": True,
        "help": (
            "of the positions that a pass would fill with the same token, all but the surest wait"
            " (samplers by certainty)"
        ),
    },
    "threshold": {
        "type": option_types.number(),
        "metavar": "P",
        "help": "threshold: fill all positions as probable (default 0.9)",
    },
    "num_beams": {
        "type": option_types.count,
        "metavar": "W",
        "help": "beams of a beam search (default: 4)",
    },
    "method": {
        "help": (
            "t2l: solver, ddim, dpm++2m, or heun for a rectified-flow model; unconditional: joint"
            " or chain (default: what the model was trained for)"
        )
    },
    "solver": {"choices": ("ddim", "dpm++2m"), "help": "solver of the embeddings"},
    "condition_timestep": {
        "type": option_types.number(0, 1),
        "metavar": "T",
        "help": (
            "noise the embedding to this timestep for the text, for embeddings that no encoder"
            " made (a model of training.l2t_condition_noise; unconditional: --method chain)"
        ),
    },
    "eta": {
        "type": eta_value,
        "metavar": "ETA",
        "help": "noise of DDIM: 0 none, 1 ancestral, bridge that of a model of schedule=decoupled",
    },
    "trace": {
        "type": option_types.path,
        "metavar": "FILE.html",
        "help": (
            f"also write a page that plays, pass by pass, how the first {MAX_TEXTS} texts were"
            " written"
        ),
    },
    **SEARCH_ARGUMENTS,
}
SOURCES = {
    "l2t": ("latent_file", "text", "text_file", "data"),
    "t2l": ("text", "text_file"),
    "unconditional": (),
    "i2t": ("image", "latent_file", "data"),
    "t2i": ("text", "text_file", "data"),
    "joint": (),
}
