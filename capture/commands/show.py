"""`capture show`: one row for a person to read. Knows how its parts are laid out."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from capture.commands.terminal import AsJson, CapturePath, console, escape, length, opened, plain, row_id
from capture.records import Generation, to_json


def show(
    generation_id: Annotated[str, typer.Argument(metavar="ID", help="A row's id, its start, or a response's id.")],
    capture: CapturePath = None,
    as_json: AsJson = False,
) -> None:
    """Print one row."""
    wanted = row_id(generation_id)
    with opened(capture) as store:
        row = store.get(wanted)
    if as_json:
        typer.echo(json.dumps(to_json(row)))
    else:
        _show(row, console())


def _show(row: Generation, console: Console) -> None:
    facts = Table.grid(padding=(0, 2))
    drafted, accepted = (sum(step[i] for step in row.steps) for i in (0, 1))
    for name, value in (
        ("id", row.id),
        ("created", row.created_at),
        ("status", row.status if row.finish_reason is None else f"{row.status} ({row.finish_reason})"),
        ("error", row.error),
        ("model", row.model),
        ("build", row.build),
        ("weights", row.weights_fingerprint),
        ("tokenizer", row.tokenizer_fingerprint),
        ("chat template", row.template_fingerprint),
        ("drafter", f"{row.drafter} {row.drafter_fingerprint}".strip()),
        ("client", row.client),
        ("seed", row.seed),
        ("parameters", json.dumps(row.parameters, ensure_ascii=False)),
        ("timings", json.dumps(row.timings, ensure_ascii=False)),
        ("tokens", f"{length(row.prompt_tokens)} prompt, {length(row.completion_tokens)} completion"),
        ("drafts", f"{accepted} of {drafted} accepted in {len(row.steps)} verify steps"),
    ):
        if value is not None:
            facts.add_row(name, plain(str(value)))
    console.print(facts)
    sections = {
        "request": json.dumps(row.request, ensure_ascii=False, indent=2),
        "reasoning": row.reasoning,
        "answer": row.response_text,
        "tool calls": json.dumps(row.tool_calls, ensure_ascii=False, indent=2) if row.tool_calls else "",
    }
    for name, text in sections.items():
        if text:
            console.print()
            console.print(Text(name, style="bold"))
            console.print(Text(escape(text, keep="\n\t")), soft_wrap=True)
