"""One rank of a preparation with small shards: _prepare_worker.py SHARD prepare ARG...
(prepare_kill_resume.py)
"""

from __future__ import annotations

import sys

from mmldlm.cli import main
from mmldlm.data.corpora import text_files
from mmldlm.data.prepare import encode, tokenize

encode.SAMPLES_PER_SHARD = tokenize.TEXTS_PER_SHARD = int(sys.argv[1])
text_files.PART_BYTES = 16384

if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
