"""`mmldlm prepare` for images: the stages that turn images with captions into a store."""
