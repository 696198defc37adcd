"""Text from latents and latents from text with one MMDiT."""
