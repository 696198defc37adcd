"""One rank of a preparation with small shards: _prepare_worker.py SHARD prepare ARG...
(prepare_kill_resume.py)
"""

from __future__ import annotations

import sys

from mmldlm.cli import main
from mmldlm.data.corpora import text_files
from mmldlm.data.prepare import encode_stage, tokenize_stage

encode_stage.SHARD = tokenize_stage.SHARD = int(sys.argv[1])
text_files.PART_BYTES = 16384

if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
