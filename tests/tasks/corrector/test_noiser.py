"""Hypotheses in training: only those of this store, read by the right samples, the same for any
cut of a batch.
"""

import numpy as np
import pytest

from mmldlm.config.renamed_keys import model_config_with_new_names, with_new_names
from mmldlm.data.batch_plan import BatchPlan
from mmldlm.data.loader import MicroBatches
from mmldlm.errors import UserError
from mmldlm.tasks.corrector.data import open_data
from mmldlm.tasks.corrector.hypotheses import SplitHypotheses
from mmldlm.tasks.corrector.noiser import CorrectorNoiser
from mmldlm.tasks.registry import build_config
from mmldlm.tasks.translation.noiser import L2T
from tests.tasks.translation.test_noiser import DIM, EOS, MASK, PAD, FakeStore, with_token_ids

MEAN, STD = np.full(DIM, 0.5, np.float32), np.full(DIM, 2.0, np.float32)


class FakeHypotheses(SplitHypotheses):
    """Every sample but each third has one: its words in reverse, its latent negated."""

    def __init__(self, samples):
        rows = np.array([row for row in range(len(samples.lengths)) if row % 3])
        self.store = FakeStore()
        self.store.ids = [samples.ids[row][::-1] for row in rows]
        self.store.latents = -samples.latents[rows]
        self.row_of = np.full(len(samples.lengths), -1)
        self.row_of[rows] = np.arange(len(rows))


def batches(world=1, accum=1, rank=0, share=0.8, **training):
    rows = FakeStore()
    training |= {"loss_type": "mixed", "condition_dropout": 0.2, "hypothesis_share": share}
    config = build_config({"task": "corrector", "training": training})
    noiser = CorrectorNoiser(with_token_ids(config), MEAN, STD, hypotheses=FakeHypotheses(rows))
    return rows, MicroBatches(rows, BatchPlan(rows.lengths, 12, 0), noiser, rank, world, accum)


def by_sample(found):
    seen = {}
    for batch in found:
        for row in np.flatnonzero(batch.real):
            length = int(batch.attention_mask[row].sum())
            seen[int(batch.ids[row])] = (
                bool(batch.hypotheses.given[row]),
                batch.hypotheses.tokens[row, :length].tolist(),
                batch.hypotheses.latents[row].tolist(),
                int(batch.modes[row]),
                bool(batch.latent_is_null[row]),
            )
    return seen


def test_which_samples_read_one_and_what_they_read():
    rows, found = batches()
    seen = by_sample(found[i] for i in range(16))
    given = [sample for sample, values in seen.items() if values[0]]
    for sample, (is_given, tokens, latent, mode, is_null) in seen.items():
        length = len(rows.ids[sample]) + 1
        if not is_given:
            assert tokens == [PAD] * length and not any(latent)
            continue
        assert sample % 3 and mode == L2T and not is_null
        assert tokens == [*rows.ids[sample][::-1].tolist(), EOS][:length]
        np.testing.assert_allclose(
            latent, (-rows.latents[sample] - MEAN) / STD, rtol=1e-5, atol=1e-6
        )
    might = [s for s, v in seen.items() if s % 3 and v[3] == L2T and not v[4]]
    assert 0.5 * len(might) < len(given) < len(might)
    everyone = by_sample(batches(share=1.0)[1][i] for i in range(9))
    assert all(v[0] for s, v in everyone.items() if s % 3 and v[3] == L2T and not v[4])


def test_texts_with_one_are_wholly_masked_and_the_others_masked_as_before():
    rows, found = batches()
    plain = batches()[1]
    plain.collator.hypotheses = None
    numbers = [0, 0]
    for i in range(4):
        batch, without = found[i], plain[i]
        for row in np.flatnonzero(found[i].real & (found[i].modes == L2T)):
            given, real = bool(batch.hypotheses.given[row]), batch.attention_mask[row]
            numbers[given] += 1
            if given:
                assert (batch.text_tokens[row, real] == MASK).all() and batch.text_timesteps[
                    row
                ] == 1
                assert (batch.text_weights[batch.text_samples == row] == 1).all()
                assert int((batch.text_samples == row).sum()) == int(real.sum())
            else:
                assert (batch.text_tokens[row] == without.text_tokens[row]).all()
                assert batch.text_timesteps[row] == without.text_timesteps[row]
    assert min(numbers) > 3


def test_a_damaged_hypothesis_is_left_out_and_named():
    rows, found = batches(share=1.0)
    hypotheses = found.collator.hypotheses
    given = [
        sample for sample, values in by_sample(found[i] for i in range(9)).items() if values[0]
    ]
    bad, unknown = given[:2]
    hypotheses.store.latents[hypotheses.row_of[bad], 1] = np.nan
    hypotheses.store.ids[hypotheses.row_of[unknown]] = np.array([4, -1])
    again = [found[i] for i in range(9)]
    seen = by_sample(again)
    assert (
        not seen[bad][0] and not seen[unknown][0] and all(seen[sample][0] for sample in given[2:])
    )
    reports = {report["id"]: report for batch in again for report in batch.bad}
    assert "non-finite" in reports[bad]["reason"] and "token id" in reports[unknown]["reason"]
    assert reports[bad]["repaired"] and len(reports) == 2


def test_a_split_without_hypotheses_gives_none():
    rows, found = batches(share=1.0)
    hypotheses = found.collator.hypotheses
    hypotheses.store.ids, hypotheses.store.latents = [], hypotheses.store.latents[:0]
    hypotheses.row_of[:] = -1
    batch = found[0]
    assert not batch.hypotheses.given.any() and not batch.hypotheses.latents.any()
    assert (batch.hypotheses.tokens == PAD).all() and not batch.bad
    assert batch.hypotheses.latents.shape == batch.latents.shape


def test_normalized_latents_have_normalized_hypotheses():
    rows = FakeStore()
    sections = {
        "latent_diffusion": {"l2_normalize": True, "scaling": "sqrt_d"},
        "task": "corrector",
    }
    noiser = CorrectorNoiser(
        with_token_ids(build_config(sections)), 0 * MEAN, STD, hypotheses=FakeHypotheses(rows)
    )
    batch = MicroBatches(rows, BatchPlan(rows.lengths, 12, 0), noiser, 0, 1, 1)[0]
    given = batch.hypotheses.given
    norms = batch.hypotheses.latents[given].norm(dim=-1) * float(STD[0])
    assert given.any() and np.allclose(norms, 1, atol=1e-5)


def test_no_draw_depends_on_ranks_or_micro_batches():
    whole = by_sample(batches()[1][i] for i in range(8))
    parts = [batches(2, 2, rank)[1] for rank in range(2)]
    assert by_sample(part[i] for part in parts for i in range(16)) == whole


def corrector_config(store, **more):
    sections = {
        "data": {"latent_data_root": str(store), **more.pop("data", {})},
        "task": "corrector",
    }
    return build_config(sections | more)


def test_the_folder_must_be_given_and_belong_to_the_store(store):
    with pytest.raises(UserError, match="data.hypotheses") as error:
        open_data(corrector_config(store))
    assert "mmldlm hypotheses" in str(error.value)
    with pytest.raises(UserError, match="without hypotheses"):
        open_data(corrector_config(store, data={"hypotheses": str(store)}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"hypotheses": "x"}}, "data.hypotheses .*task=corrector"),
        ({"training": {"hypothesis_share": 0.5}}, "training.hypothesis_share .*task=corrector"),
        ({"model": {"corrector": "feedback"}}, "model.corrector .*task=corrector"),
        ({"task": "corrector", "training": {"loss_type": "t2l"}}, "trains no l2t"),
        ({"task": "corrector", "model": {"latent_rope": True}}, "model.latent_rope=True"),
        ({"task": "corrector", "model": {"corrector": "none"}}, "model.corrector"),
    ],
)
def test_config_that_does_not_fit_together(sections, message):
    with pytest.raises(UserError, match=message):
        build_config(sections)


def test_configs_of_translation_that_held_the_unused_keys_are_read():
    unused = {"model": {"corrector": "none"}, "data": {"hypotheses": None}}
    for share in (0.4, 0.8):  # 0.8 was the default of earlier runs
        build_config(unused | {"training": {"hypothesis_share": share}})


def test_stored_configs_of_the_translation_task_become_those_of_the_corrector():
    stored = {
        "task": "translation",
        "model": {"corrector": "blind"},
        "data": {"hypotheses": "h"},
        "training": {"hypothesis_share": 0.8},
    }
    assert with_new_names(stored) == stored | {"task": "corrector"}
    values = {"task": "translation", "architecture": "MultimodalMMDiT", "corrector": "feedback"}
    assert model_config_with_new_names(values) == {"task": "corrector", "corrector": "feedback"}
    assert model_config_with_new_names(values | {"corrector": "none"}) == {
        "task": "translation",
        "architecture": "MultimodalMMDiT",
    }
