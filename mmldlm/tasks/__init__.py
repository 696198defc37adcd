"""What is trained: one folder per task."""
