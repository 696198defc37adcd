"""What `mmldlm sample`, `mmldlm evaluate` and a Python call do with a trained model."""
