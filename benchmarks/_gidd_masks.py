"""Is GIDD without uniform noise MDLM? Both bounds of one model, on the same masks."""

from __future__ import annotations

from pathlib import Path


def bound_difference(run: Path, store: str, count: int = 64, draws: int = 4) -> float:
    """Difference in nats a token between GIDD's bound (at uniform_share 0) and MDLM's, whose
    weight is 1 / t.
    """
    import torch

    from mmldlm.data.store import Store
    from mmldlm.diffusion.timesteps import arcsine
    from mmldlm.evaluation.sentences import choose_sentences
    from mmldlm.sampling.latent_sampler import pad_texts
    from mmldlm.sampling.pretrained import load_pretrained
    from mmldlm.tasks.text_scores import sum_by_row
    from mmldlm.utils.counter_rng import Stream, uniforms

    pretrained = load_pretrained(run / "latest")
    task, model, config = pretrained.task, pretrained.model, pretrained.model.config
    split = Store(store, "validation")
    sentences = choose_sentences(split, model, min(count, len(split)), 0)
    tokens, real = pad_texts(sentences.tokens, config.eos_token_id, config.pad_token_id)
    uniform = uniforms(0, Stream.LIKELIHOOD, range(len(tokens)), (draws, tokens.shape[1] + 1))
    process, difference = task.process_of_model(pretrained), 0.0
    with torch.inference_mode():
        for draw in range(draws):
            own = torch.cat([uniform[:, draw, :-1], uniform[:, 0, -1:]], dim=1)
            ours = task.score_texts(pretrained, tokens, real, None, own, (draw, draws)).nats
            t, density = arcsine((draw + own[:, -1]) / draws)
            noised, _ = process.corrupt(tokens, t, own[:, :-1], real)
            positions = (noised == config.mask_token_id).flatten().nonzero()[:, 0]
            owner, targets = positions // tokens.shape[1], tokens.flatten()[positions]
            out = model(
                noised,
                None,
                t.float(),
                None,
                real,
                text_positions=positions,
                text_targets=targets,
                text_weights=torch.ones(len(targets)),
            )
            theirs = sum_by_row(
                out["text_nll"].double() * (density / t)[owner], owner, len(tokens)
            )
            difference += float((ours - theirs).sum())
    return abs(difference) / draws / float(real.sum())
