"""Checkpoint files of others, read lazily and without running anything in them; safetensors, written in a stream."""
