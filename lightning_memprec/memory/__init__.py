"""What a run will need: pure functions and plain results, without Lightning."""
