"""What each figure of an evaluation means, in a plain sentence, by its key in the JSON."""

from __future__ import annotations

MEANINGS = {
    "nelbo_right": (
        "How surprised the model is by a text, given its own embedding. Lower is better."
    ),
    "nelbo_shuffled": "The same, given the embedding of another sentence.",
    "nelbo_null": "The same, given no embedding.",
    "gain_null": (
        "What the embedding tells the model about the text. 0 means that the model ignores it."
    ),
    "gain_shuffled": "What the right embedding tells beyond the embedding of any other sentence.",
    "token_accuracy_right": "Share of hidden tokens whose most probable candidate is right.",
    "token_accuracy_null": "The same without an embedding.",
    "length_nll_right": (
        "How surprised the model is by the length of the text, given its embedding."
    ),
    "length_nll_null": "The same without an embedding.",
    "length_error": "Mean distance between the length that the model chose and the right one.",
    "length_error_shuffled": "The same, against the length of another sentence.",
    "passes": "Passes of the model, one after the other, until a text was complete; the mean.",
    "f1_right": "Overlap of the token sets of a written text and its sentence, from 0 to 100.",
    "f1_shuffled": "The same, for the text that was written from another sentence's embedding.",
    "f1_gap": "Difference of the two: what the texts owe to their own embeddings.",
    "reencoded_cosine": (
        "Similarity of the embedding of the written text and the embedding it was written from."
    ),
    "reencoded_cosine_shuffled": "The same, with the embedding of another sentence.",
    "nearest_training_cosine": (
        "Without a model: the nearest sentence of the training split instead of a written one."
    ),
    "cosine": "Similarity of the embedding that the model made of a text and the encoder's.",
    "cosine_shuffled": "The same, with the encoder's embedding of another sentence.",
    "mean_embedding_cosine": "Without a model: the mean of all embeddings, whatever the text.",
    "recall_at_1": (
        "Share of texts whose made embedding is nearer to its own than to any other sentence's."
    ),
    "recall_at_10": "Share of texts whose own embedding is among the ten nearest to the made one.",
    "mean_embedding_recall_at_1": "The same for the mean embedding.",
    "chance_recall_at_1": "The same for a guess.",
    "norm_ratio": (
        "Length of the made embedding as a vector over that of the encoder's. 1 is right."
    ),
}
CLAIM_MEANINGS = {
    "l2t_gain_null_nats": "The embedding tells the model much about the text.",
    "l2t_f1_gap_points": "The written texts fit their own embeddings better than others'.",
    "t2l_recall_at_1": "An embedding made from a text leads back to it.",
    "untrained_gain_in_standard_errors": (
        "A model without training gains nothing: the measurement is sound."
    ),
}
