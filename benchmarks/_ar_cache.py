"""Does an autoregressive model give the same likelihoods with its cache as without?"""

from __future__ import annotations

from pathlib import Path


def cache_difference(run: Path, store: str, count: int = 16) -> float:
    """Largest difference in nats a token between teacher forcing and one token after the other,
    over some texts.
    """
    import torch

    from mmldlm.data.store import Store
    from mmldlm.evaluation.sentences import choose_sentences
    from mmldlm.models.plain.decode import next_logits, start_text
    from mmldlm.sampling.latent_sampler import pad_texts
    from mmldlm.sampling.pretrained import load_pretrained

    pretrained = load_pretrained(run / "latest")
    model, config = pretrained.model, pretrained.model.config
    sentences = choose_sentences(Store(store, "validation"), model, count, 0)
    tokens, real = pad_texts(sentences.tokens, config.eos_token_id, config.pad_token_id)
    latents = None
    if config.conditioning != "none":
        latents = model.scale_latents(torch.from_numpy(sentences.latents))
    with torch.inference_mode():
        unread = torch.empty(len(tokens), tokens.shape[1] + 1)
        expected = pretrained.task.score_texts(
            pretrained, tokens, real, latents, unread, (0, 1)
        ).nats
        cache, found = start_text(model, latents, len(tokens)), torch.zeros_like(expected)
        for place in range(tokens.shape[1]):
            logits = next_logits(model, cache, None if place == 0 else tokens[:, place - 1])
            log_p = logits.double().log_softmax(-1).gather(1, tokens[:, place, None])[:, 0]
            found -= torch.where(real[:, place], log_p, 0.0)
    return float(((found - expected).abs() / real.sum(1)).max())
