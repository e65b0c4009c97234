"""What would make a run fit: each change is traced in the user's own configuration, none is a fixed percentage."""

from lightning_memprec.memory.remedies.search import suggest_remedies

__all__ = ["suggest_remedies"]
