"""The `training` command: from captured answers to a better drafter. Each command is a module of training/commands.

Heavy imports wait inside the commands that need them, so that help and errors are quick.
"""

from __future__ import annotations

import typer

from training.commands.checkpoints import checkpoints
from training.commands.default import first_of
from training.commands.distill import distill
from training.commands.evaluate import evaluate
from training.commands.extract import extract
from training.commands.hot_vocab import grow, hot_vocab
from training.commands.judge import judge
from training.commands.loop import loop
from training.commands.promote import promote
from training.commands.report import report
from training.commands.targets import targets
from training.commands.terminal import errors
from training.commands.tiny import tiny

app = typer.Typer(
    name="training",
    help="Train drafters, and the small model that comes with draftloop.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(first_of({"build": hot_vocab, "grow": grow}), name="hot-vocab")
app.add_typer(first_of({"drafters": evaluate, "checkpoints": checkpoints}), name="evaluate")
app.command()(extract)
app.command()(targets)
app.command()(distill)
app.command()(tiny)
app.command()(judge)
app.command()(promote)
app.command()(loop)
app.command()(report)


def main() -> None:
    """Entry point: errors made on purpose are one line on stderr and exit code 2."""
    from backend.interface import BackendError
    from capture.records import CaptureError
    from training.errors import TrainingError

    try:
        app()
    except (BackendError, CaptureError, TrainingError) as error:
        errors.print(f"error: {error}", highlight=False, markup=False, soft_wrap=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
