"""mmldlm: one MMDiT that translates between text and sentence embeddings, trained at scale."""

import os
import sys

__version__ = "0.1.0"

# `python -m mmldlm.MODULE` puts the working folder first on the path, and the user's own random.py
# there would replace Python's. While the module is searched for, sys.argv[0] is "-m"; this package
# is imported before any of its modules.
if sys.argv[:1] == ["-m"] and not getattr(sys.flags, "safe_path", False):
    _module = sys.orig_argv[-len(sys.argv)].removeprefix("-m")
    if _module.split(".")[0] == __name__:
        _folder = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
        # This very package stays the one that is found, also where it is not installed.
        sys.path[:1] = [] if _folder in sys.path[1:] else [_folder]
