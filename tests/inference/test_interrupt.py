"""An interrupt keeps what a sampler has finished: the samples of a call without one."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from mmldlm.inference.generate import Samples
from mmldlm.inference.judges import best_of
from mmldlm.inference.local_search import LocalSearchSettings, local_search
from mmldlm.inference.sample import fit_options, run_sampler
from mmldlm.sampling.autoregressive import write_texts
from mmldlm.sampling.joint import sample_joint
from mmldlm.sampling.latents import sample_latents
from mmldlm.sampling.posterior import sample_by_posterior
from mmldlm.sampling.records import SamplingInterrupted
from mmldlm.sampling.text import sample_lengths, sample_text
from mmldlm.tasks.image_codes.sampling import sample_codes, sample_codes_and_texts
from tests.sampling.test_autoregressive import make_model as make_causal_model
from tests.sampling.test_posterior import PROCESSES, model_of
from tests.tasks.image_codes.test_model import make_model as make_codes_model


def samplers(pretrained, hidden, new_judge):
    """Calls without `progress`, each in batches of one or a few samples."""
    model, (_, embeddings) = pretrained.model, hidden
    text, latent = pretrained.text_diffusion, pretrained.latent_diffusion
    codes_model = make_codes_model()
    points = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    few_tokens = {"batch_tokens": 1}
    masked = {"diffusion": text, "steps": 3, **few_tokens}
    processes = {"text_diffusion": text, "latent_diffusion": latent, "steps": 3}
    return {
        "masked": partial(sample_text, model, embeddings, **masked),
        "lengths": partial(sample_lengths, model, embeddings, 3, **masked),
        "latents": partial(
            sample_latents, model, None, num_samples=5, diffusion=latent, steps=3, **few_tokens
        ),
        "joint": partial(sample_joint, model, 5, batch_size=2, **processes),
        "causal": partial(write_texts, make_causal_model(), points[:, :4], **few_tokens),
        "beam": partial(
            write_texts, make_causal_model(), points[:, :4], sampler="beam", **few_tokens
        ),
        "posterior": partial(
            sample_by_posterior, model_of(), points, PROCESSES["gidd"], num_steps=3, **few_tokens
        ),
        "codes": partial(sample_codes, codes_model, None, num_samples=5, steps=3, **few_tokens),
        "codes and texts": partial(
            sample_codes_and_texts, codes_model, 5, text_diffusion=text, steps=3, batch_size=2
        ),
        "local search": lambda **more: local_search(
            pretrained,
            embeddings,
            new_judge(),
            settings=LocalSearchSettings(judge_calls=12),
            num_steps=3,
            **more,
        ),
    }


NAMES = (
    "masked", "lengths", "latents", "joint", "causal", "beam", "posterior", "codes",
    "codes and texts", "local search",
)  # fmt: skip


def stopping_after(number: int):
    """A callback that is interrupted when it is called once more."""
    left = [number]

    def progress(*report):
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1

    return progress


def parts(result, rows):
    """What a result holds of some rows."""
    if isinstance(result, tuple):
        return [parts(part, rows) for part in result]
    if isinstance(result, torch.Tensor):
        return result[rows].tolist()
    return [result.tokens[row] for row in rows]


@pytest.mark.parametrize("name", NAMES)
def test_finished_samples_are_those_of_a_whole_call(name, pretrained, hidden, new_judge):
    call, reports = samplers(pretrained, hidden, new_judge)[name], []
    whole = call(progress=lambda *report: reports.append(report))
    kept = []
    numbers = sorted({0, 1, len(reports) // 3, len(reports) // 2, len(reports) - 1})
    for number in numbers:
        try:
            call(progress=stopping_after(number))
        except SamplingInterrupted as interrupt:
            rows = interrupt.rows
            assert parts(interrupt.result, rows) == parts(whole, rows)
            kept.append(len(rows))
        except KeyboardInterrupt:
            kept.append(0)
    assert kept == sorted(kept) and len(kept) == len(numbers) and kept[-1] > 0


def test_no_candidate_is_kept_before_the_last_one(pretrained, hidden, new_judge):
    with pytest.raises(KeyboardInterrupt) as caught:
        best_of(
            pretrained,
            hidden[1],
            new_judge(),
            num_candidates=4,
            num_steps=3,
            progress=stopping_after(2),
        )
    assert not isinstance(caught.value, SamplingInterrupted)


class StoppedBar:
    """In place of a progress bar: interrupts the n-th stage after some of its reports."""

    def __init__(self, stage: int, number: int):
        self.stage, self.number = stage, number

    def start(self, message):
        self.stage -= 1
        return stopping_after(self.number) if self.stage == 0 else lambda *report: None


def test_a_chain_keeps_the_pairs_whose_texts_are_written(pretrained, monkeypatch):
    given = {"num_samples": 70, "num_steps": 3, "method": "chain"}
    kind, options = fit_options(pretrained, "unconditional", given)

    def chain(bar) -> Samples:
        return run_sampler(pretrained, kind, options, bar)

    whole = chain(StoppedBar(0, 0))
    assert whole.num_missing == 0
    monkeypatch.setattr(
        "mmldlm.sampling.text.token_budget_batches", lambda *_: np.arange(70).reshape(7, 10)
    )
    some = chain(StoppedBar(2, 15))
    assert some.num_missing == 70 - len(some.records) and 0 < some.num_missing < 70
    rows = [record["index"] for record in some.records]
    assert [record["text"] for record in some.records] == [
        whole.records[row]["text"] for row in rows
    ]
    assert [record["latent"] for record in some.records] == list(range(len(rows)))
    np.testing.assert_array_equal(some.latents, whole.latents[rows])
    with pytest.raises(KeyboardInterrupt):
        chain(StoppedBar(1, 1))
