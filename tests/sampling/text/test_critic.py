"""The critic of a tiny trained model: it finds planted words, and its rounds stay in their
bounds.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmldlm.config.load import build_config
from mmldlm.data.batch_plan import BatchPlan
from mmldlm.data.store import Rows
from mmldlm.errors import UserError
from mmldlm.models import MultimodalMMDiT
from mmldlm.sampling.pretrained import Pretrained
from mmldlm.sampling.text import critic
from mmldlm.sampling.text.critic import text_qualities
from mmldlm.tasks.translation.data import open_data
from mmldlm.tasks.translation.noiser import Noiser
from mmldlm.tasks.translation.objective import TranslationObjective
from mmldlm.tasks.translation.task import TranslationTask
from mmldlm.tasks.translation.word_swaps import WordSwaps

DIM, WORDS, FIRST, STEPS, BATCH = 12, 24, 4, 400, 64


class Sentences:
    """Texts of 5 to 8 words from 16 sentences; a latent is its sentence's, with so much noise that
    it can mislead.
    """

    def __init__(self, seed: int, count: int):
        of_sentences, rng = np.random.default_rng(0), np.random.default_rng(seed)
        sentences = [
            of_sentences.integers(FIRST, FIRST + WORDS, of_sentences.integers(5, 9))
            for _ in range(16)
        ]
        centers, which = of_sentences.standard_normal((16, DIM)), rng.integers(0, 16, count)
        self.tokens = [sentences[i] for i in which]
        self.latents = (centers[which] + 0.7 * rng.standard_normal((count, DIM))).astype(
            np.float32
        )
        self.lengths = np.array([len(tokens) + 1 for tokens in self.tokens], dtype=np.int32)

    def get(self, indices):
        return Rows([self.tokens[i] for i in indices], self.latents[indices])


def config_of(**model):
    sizes = {
        "hidden_size": 32,
        "n_blocks": 2,
        "n_heads": 2,
        "cond_dim": 32,
        "max_seq_len": 12,
        "latent_dim": DIM,
        "tokens_per_latent": 2,
        "vocab_size": FIRST + WORDS,
        "mask_token_id": 3,
        "pad_token_id": 0,
        "eos_token_id": 2,
    }
    return build_config({"model": {**sizes, **model}, "training": {"loss_type": "l2t"}})


def trained(steps: int = STEPS, **model) -> tuple[MultimodalMMDiT, list[float]]:
    config, rows = config_of(**model), Sentences(1, 1024)
    torch.manual_seed(0)
    net, objective = MultimodalMMDiT(config.model), TranslationObjective(config)
    swaps = (
        WordSwaps(np.bincount(np.concatenate(rows.tokens), minlength=FIRST + WORDS))
        if net.quality_head
        else None
    )
    noiser = Noiser(
        config, 3, 0, 2, np.zeros(DIM, np.float32), np.ones(DIM, np.float32), swaps=swaps
    )
    plan, losses = BatchPlan(rows.lengths, BATCH, 0), []
    used = [
        parameter
        for name, parameter in net.named_parameters()
        if not name.startswith("latent_head")
    ]
    optimizer = torch.optim.AdamW(used, lr=4e-3, weight_decay=0.0)
    for step in range(steps):
        loss, sums = objective(
            net, noiser.collate(plan.batch(step), np.arange(BATCH), rows, rows.lengths)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(sums["text_nelbo_sum"]))
    return net.eval(), losses


@pytest.fixture(scope="module")
def critical():
    net, _ = trained(quality_head=True)
    return Pretrained(
        net, None, build_config({}).text_diffusion, None, {"l2t": 1.0}, 0.0, task=TranslationTask()
    )


@pytest.fixture(scope="module")
def drafts(critical):
    """Latents of 60 texts, and what the model writes in one pass: many wrong words."""
    latents = torch.from_numpy(Sentences(2, 60).latents)
    return latents, write(critical, latents)


def write(pretrained, latents, **options):
    options = {"sampler": "confidence", "num_steps": 1, "seed": 3, **options}
    return pretrained.task.write_texts(pretrained, latents, **options)


def test_planted_words_are_found(critical):
    rows, rng, right, wrong = Sentences(3, 100), np.random.default_rng(4), [], []
    texts, places = [], rng.integers(0, 5, 100)
    for tokens, place in zip(rows.tokens, places):
        text = tokens.tolist()
        text[place] = FIRST + (text[place] - FIRST + int(rng.integers(1, WORDS))) % WORDS
        texts.append(text)
    for quality, place in zip(
        text_qualities(critical.model, torch.from_numpy(rows.latents), texts), places.tolist()
    ):
        wrong.append(quality[place])
        right += [value for other, value in enumerate(quality) if other != place]
    planted, others = torch.stack(wrong), torch.stack(right)
    assert float((planted[:, None] < others).double().mean()) > 0.9  # AUC


def test_a_model_without_the_head_starts_from_the_same_weights():
    (with_head, _), (without, _) = trained(0, quality_head=True), trained(0)
    state, plain = with_head.state_dict(), without.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.items())
    own = set(state) - set(plain)
    assert (
        own
        and all(name.startswith("quality_head.") for name in own)
        and without.quality_head is None
    )


def test_no_rounds_or_no_share_are_the_plain_sampler(critical, drafts):
    latents, plain = drafts
    for options in ({"critic_rounds": 0}, {"critic_rounds": 4, "critic_share": 0.0}):
        found = write(critical, latents, **options)
        assert found.tokens == plain.tokens and found.num_rows == plain.num_rows
        assert torch.equal(found.passes, plain.passes)


@pytest.mark.parametrize("rounds", [1, 4])
def test_rounds_keep_lengths_and_bounds_and_only_what_is_judged_better(critical, drafts, rounds):
    latents, plain = drafts
    found = write(critical, latents, critic_rounds=rounds, critic_share=0.4)
    words = plain.lengths - 1
    assert (
        torch.equal(found.lengths, plain.lengths)
        and [len(text) for text in found.tokens] == words.tolist()
    )
    extra = found.passes - plain.passes
    assert bool((extra >= 2).all()) and bool((extra <= 1 + rounds * (words + 1)).all())
    assert found.num_rows - plain.num_rows <= int(extra.sum()) and found.num_rows > plain.num_rows
    assert found.num_scored > plain.num_scored > 0  # the logits of both count
    before, after = (
        text_qualities(critical.model, latents, each.tokens) for each in (plain, found)
    )
    for text, draft, new, old in zip(found.tokens, plain.tokens, after, before):
        assert float(new.mean()) > float(old.mean()) if text != draft else torch.equal(new, old)
    assert found.tokens != plain.tokens


def test_the_rounds_bring_texts_nearer_to_the_right_ones(critical, drafts):
    latents, plain = drafts
    references = Sentences(2, 60).tokens
    found = write(critical, latents, critic_rounds=8, critic_share=0.4)

    def right(texts):
        return sum(
            sum(a == b for a, b in zip(text, ref.tolist())) for text, ref in zip(texts, references)
        )

    # Of 404 words. The model is trained here; its gain depends on the rounding of the CPU: 8 on
    # one, over 10 on others.
    assert right(found.tokens) > right(plain.tokens) + 5


def test_batches_change_no_text(critical, drafts):
    latents, _ = drafts
    options = {"critic_rounds": 3, "critic_share": 0.4, "temperature": 1.0}
    whole = write(critical, latents[:12], **options)
    assert write(critical, latents[:12], batch_tokens=1, **options).tokens == whole.tokens


def test_a_round_masks_the_least_certain_words_that_are_not_left_alone():
    quality = [
        torch.tensor([0.9, 0.1, 0.5, 0.3]).double(),
        torch.tensor([0.2]).double(),
        torch.empty(0).double(),
    ]
    alone = [
        torch.tensor([False, True, False, False]),
        torch.tensor([True]),
        torch.empty(0, dtype=torch.bool),
    ]
    assert [where.tolist() for where in critic._most_doubted(quality, alone, 0.3)] == [
        [3, 2],
        [],
        [],
    ]


def test_what_cannot_be_criticized_is_refused():
    net, _ = trained(0)
    plain = Pretrained(
        net, None, build_config({}).text_diffusion, None, {"l2t": 1.0}, 0.0, task=TranslationTask()
    )
    with pytest.raises(UserError, match="quality head") as error:
        write(plain, torch.zeros(1, DIM), critic_rounds=1)
    assert error.value.exit_code == 2
    with pytest.raises(UserError, match="ZeRO-3"):
        open_data(build_config({"model": {"quality_head": True}, "engine": {"zero_stage": 3}}))
    with pytest.raises(UserError, match="quality_loss_weight"):
        build_config({"loss": {"quality_loss_weight": 2.0}})
    with pytest.raises(UserError, match="quality_head"):
        build_config({"model": {"quality_head": True}, "training": {"loss_type": "t2l"}})
