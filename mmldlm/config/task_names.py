"""The values of the key `task` that are tasks of mmldlm; `mmldlm.tasks.registry` finds them.

A user's own task is named package.module:Class.
"""

TASK_NAMES = (
    "ar",
    "corrector",
    "gidd",
    "hdlm",
    "image_codes",
    "image_text",
    "mdlm",
    "translation",
)
DEFAULT_TASK = "translation"
