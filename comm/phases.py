"""What a node, or a run, is doing, as people read it. JSON, metrics and the wire have the phases' own names."""

WORDS = {"inner": "training", "sync": "exchange"}  # the others are words already


def phase_word(phase: str) -> str:
    """A phase as the page and the docs call it."""
    return WORDS.get(phase, phase)
