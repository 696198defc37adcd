"""One rank of a preparation with small shards, for prepare_kill.py: _prepare_rank.py SHARD prepare WORD..."""

from __future__ import annotations

import sys

from mmldlm.cli import main
from mmldlm.data import encoding, readers, tokenizing

encoding.SHARD = tokenizing.SHARD = int(sys.argv[1])
readers.PART_BYTES = 16384

if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
