"""What training raises on purpose; `str(error)` is one line, fit for a user."""


class TrainingError(Exception):
    """An input that cannot be used, or a run that cannot go on, with what was wrong and what to do."""
