"""Statistics of latents."""

from __future__ import annotations
import argparse
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
import numpy as np
import pytest
import torch
from mmldlm import cli
from mmldlm.commands import prepare, verify_data
from mmldlm.data.encoders import encoder
from mmldlm.data.prepare import encode_stage, options, pipeline
from mmldlm.data.prepare import tokenizer as tokenizers
from mmldlm.data.prepare.options import PrepareOptions
from mmldlm.data.prepare.publish_stage import check_output_free
from mmldlm.data.prepare.task_queue import TaskQueue
from mmldlm.data.prepare.work_dir import WorkDir
from mmldlm.data.sentences import normalize
from mmldlm.data.store import verify
from mmldlm.data.store.latent_statistics import LatentStatistics
from mmldlm.data.store.store import Store, load_tokenizer
from mmldlm.errors import MmldlmError, UserError
from tests.helpers import run_ranks


def test_statistics_do_not_depend_on_the_blocks():
    latents = np.random.default_rng(0).normal(3.0, 0.1, (100, 5)).astype(np.float32)
    whole, parts = LatentStatistics(5), LatentStatistics(5)
    whole.add(latents)
    for block in np.array_split(latents, 7):
        parts.add(block)
    np.testing.assert_allclose(whole.result()["std"], latents.astype(np.float64).std(0), rtol=1e-9)
    np.testing.assert_allclose(whole.result()["std"], parts.result()["std"], rtol=1e-9)
