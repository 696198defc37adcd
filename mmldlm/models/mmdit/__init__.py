"""The MMDiT (Multimodal Diffusion Transformer), its blocks and its packed layout."""
