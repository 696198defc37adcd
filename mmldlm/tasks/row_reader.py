"""Reads rows of a store for a collator; what cannot be trained on becomes a placeholder and is
reported.
"""

from __future__ import annotations

import numpy as np

from mmldlm.data.store import Rows


class RowReader:
    """Reads and checks the samples of a micro-batch.

    Args:
        vocab_size: tokens are below it.
        latent_mean: [D] raw latent that takes the place of an unusable one.
        max_norm: a latent above this norm is a corrupted row; it is left out and reported.
        nan_to_num: replace non-finite values of a latent by the mean (stability.nan_to_num).
    """

    def __init__(
        self, vocab_size: int, latent_mean: np.ndarray, max_norm: float, nan_to_num: bool
    ):
        self.vocab_size, self.latent_mean, self.max_norm = vocab_size, latent_mean, max_norm
        self.nan_to_num, self.zero_ok = nan_to_num, False

    def read(
        self, samples, ids: np.ndarray, slots: np.ndarray, num_real: int, lengths: np.ndarray
    ) -> tuple[Rows, np.ndarray, list[dict]]:
        """Read the rows; return them, which of them are unusable, and the reports of Batch.bad.

        Args:
            samples: a store.
            ids: [B] of its samples.
            slots: [B] positions in the global batch, of which the first num_real hold samples.
            lengths: [N] tokens of every sample, EOS included.

        An unusable sample becomes a placeholder of weight 0, as one past the end of the batch: all
        ranks keep the same shapes and collectives. The counts of the global batch still include
        it, because other ranks do not know of it.
        """
        rows, repaired = self._replace_nonfinite(samples.get(ids))
        self.zero_ok = getattr(samples, "kind", "text") == "image"  # a black patch is a patch
        reasons = [
            self._rejection_reason(rows.tokens[row], rows.latents[row], lengths[sample])
            for row, sample in enumerate(ids)
        ]
        is_bad = np.array([reason is not None for reason in reasons])
        if is_bad.any():
            replaced = is_bad.reshape(is_bad.shape + (1,) * (rows.latents.ndim - 1))
            rows = rows._replace(
                tokens=[
                    tokens[:0] if bad else tokens
                    for tokens, bad in zip(rows.tokens, is_bad, strict=True)
                ],
                latents=np.where(
                    replaced, self.latent_mean.astype(rows.latents.dtype), rows.latents
                ),
            )
        reports = [
            {
                "id": int(sample),
                "reason": reason or repaired[row],
                **({} if reason else {"repaired": True}),
            }
            for row, (sample, slot, reason) in enumerate(zip(ids, slots, reasons, strict=True))
            if (reason or row in repaired) and slot < num_real
        ]
        return rows, is_bad, reports

    def _replace_nonfinite(self, rows: Rows) -> tuple[Rows, dict[int, str]]:
        """Replace non-finite latent values by the mean (stability.nan_to_num); return what was
        done by row.
        """
        if not self.nan_to_num or np.isfinite(rows.latents).all():
            return rows, {}
        bad = ~np.isfinite(rows.latents)
        what = "non-finite values in its latent, replaced by the mean (stability.nan_to_num)"
        repaired = {
            int(row): f"{int(bad[row].sum())} {what}" for row in np.unique(np.nonzero(bad)[0])
        }
        mean = self.latent_mean.astype(rows.latents.dtype)
        return rows._replace(latents=np.where(bad, mean, rows.latents)), repaired

    def _rejection_reason(self, tokens: np.ndarray, latent: np.ndarray, length: int) -> str | None:
        """Return why a sample must not be trained on; None for a valid one."""
        return self._rejected_latent(latent) or self._rejected_tokens(tokens, length)

    def _rejected_latent(self, latent: np.ndarray) -> str | None:
        if not np.isfinite(latent).all():
            return f"{int((~np.isfinite(latent)).sum())} non-finite values in its latent"
        norms = np.linalg.norm(latent, axis=-1).reshape(-1).tolist()
        norm = next(
            (norm for norm in norms if norm > self.max_norm or not (norm or self.zero_ok)), None
        )
        if norm is not None:
            least = "" if self.zero_ok else "above 0 and "
            return f"a latent of norm {norm:.4g}, expected {least}at most {self.max_norm:.4g}"
        return None

    def _rejected_tokens(self, tokens: np.ndarray, length: int) -> str | None:
        if len(tokens) + 1 != length:
            return f"{len(tokens)} tokens where the index says {length - 1}"
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= self.vocab_size):
            return f"a token id outside 0..{self.vocab_size - 1}"
        return None
