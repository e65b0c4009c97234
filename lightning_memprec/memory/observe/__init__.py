"""What a run does with memory: readings of a device, and what they show."""
