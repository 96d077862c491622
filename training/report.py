"""Ledgers as one page of HTML that needs nothing besides itself: plots, tables with their n, every run, failures too.

Takes what ledgers say as anybody's text: whatever is missing or odd in a line is left out, and nothing of it is markup.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from training import plots
from training.errors import TrainingError
from training.ledger import Ledger, Run
from training.plots import Point, Series, Theme

MOST_SERIES = len(plots.COLOURS)
_LARGEST = 1e100
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #5b6875; --line: #d5dbe1; --bad: #a52a1c; --good: #19703c; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dde4ec; --soft: #98a5b3; --line: #36414d; --bad: #ff9d8f; --good: #7fd8a0; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: Canvas; max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem } p.note { color: var(--soft) }
div.wide { overflow-x: auto } img { max-width: 100% }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; margin: .6rem 0 }
th, td { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
.ok { color: var(--good) } .refused, .negative, .failed, .running { color: var(--bad) }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12px; color: var(--soft) }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def report(ledgers: Sequence[Path], out: Path) -> Path:
    """Write the page. Raises TrainingError where a file cannot be read or is no ledger, the page not written, nothing
    drawn."""
    plots.require()
    runs: dict[str, Run] = {}
    damaged = 0
    for path in ledgers:
        found, broken = Ledger(path).read()
        if broken and not found:
            raise TrainingError(f"{path} is no ledger: none of its {broken} lines tells of a run")
        runs |= {run.id: run for run in found}
        damaged += broken
    page = html(sorted(runs.values(), key=lambda run: run.started), damaged)
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise TrainingError(f"cannot write {out}: {error.strerror or error}") from error
    return out


def html(runs: Sequence[Run], damaged: int = 0) -> str:
    """The page of these runs, oldest first; the same for the same runs."""
    sections = (_promotions, _acceptance, _learning, _coverage)
    body = "".join(part for section in sections for part in section(runs))
    lost = f" {damaged} damaged lines were left out." if damaged else ""
    span = f"{len(runs)} runs, {runs[0].started} to {runs[-1].started}." if runs else "No run yet."
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width"><title>draftloop training</title>'
        f"<style>{_STYLE}</style></head><body><h1>draftloop training</h1>"
        f'<p class="note">{escape(span + lost)}</p>{body}{"".join(_runs(runs))}</body></html>\n'
    )


def _promotions(runs: Sequence[Run]) -> Iterator[str]:
    tried = [run for run in runs if run.command == "promote" and run.figures]
    if not tried:
        return
    yield "<h2>Speed: promotions</h2>"
    yield _note("Candidate over incumbent, 95 % intervals; promoted only where both lie above 1 whole.")
    ends = ("tokens/s of candidate", "tokens/s of incumbent")
    series = []
    for run in tried[-MOST_SERIES // 2 :]:
        pairs = [pair for pair in _list(run.figures.get("blocks")) if len(_numbers(pair)) == 2]
        for side, end in enumerate(ends):
            points = tuple(Point(i + 1, float(pair[side])) for i, pair in enumerate(pairs))
            if points:
                name = run.figures.get("candidate" if side == 0 else "incumbent")
                series.append(Series(f"{name}, {end.removeprefix('tokens/s of ')}", points))
    if series:
        yield _picture(lambda theme: plots.dots(series, "pair of blocks", "tokens/s", theme), "tokens per second")
    yield _table(
        ("when", "candidate", "over", "promoted", "by steps", "tokens/s", "requests", "τ", "why"),
        (
            (
                run.started,
                run.figures.get("candidate"),
                run.figures.get("incumbent"),
                "yes" if run.figures.get("promoted") else "no",
                _interval(run.figures.get("steps")),
                _interval(run.figures.get("throughput")),
                run.figures.get("requests"),
                f"{_short(run.figures.get('candidate_tau'))} / {_short(run.figures.get('incumbent_tau'))}",
                run.figures.get("reason"),
            )
            for run in tried
        ),
    )


def _acceptance(runs: Sequence[Run]) -> Iterator[str]:
    """One line a drafter and set of documents, the last time it was evaluated; a checkpoint is known by what it is."""
    latest: dict[str, tuple[Run, Mapping[str, Any]]] = {}
    for run in runs:
        if run.command == "evaluate":
            for row in _list(run.figures.get("rows")):
                if isinstance(row, Mapping) and isinstance(row.get("walk"), Mapping):
                    key = f"{row.get('name')} {row.get('fingerprint')} {run.figures.get('documents')}"
                    latest.pop(key, None)
                    latest[key] = run, row
    if not latest:
        return
    yield "<h2>Acceptance per slot</h2>"
    yield _note(
        "Walks along held-out answers, as greedy serving makes them: surv of slot s is A_s / P_s, slots 0 to s all "
        "accepted. 95 % document bootstrap intervals; n are verify steps in which the slot was proposed."
    )
    series = []
    for _, row in list(latest.values())[-MOST_SERIES:]:
        found = enumerate(map(_figure, _list(row["walk"].get("surv"))))
        points = tuple(Point(slot, *figure[:3]) for slot, figure in found if figure)
        series.append(Series(f"{row.get('name')} {str(row.get('fingerprint'))[:6]}", points))
    yield _picture(lambda theme: plots.dots(series, "draft slot", "surv", theme), "acceptance per slot")
    yield _table(
        ("drafter", "fingerprint", "weights read", "documents", "surv by slot", "chain", "τ", "steps", "when"),
        (
            (
                row.get("name"),
                str(row.get("fingerprint"))[:8],
                row.get("parameters_read"),
                run.figures.get("documents"),
                ", ".join(_interval(one) for one in _list(row["walk"].get("surv"))),
                _interval(row["walk"].get("chain")),
                _interval(row["walk"].get("tau")),
                row["walk"].get("steps"),
                run.started,
            )
            for run, row in latest.values()
        ),
    )


def _learning(runs: Sequence[Run]) -> Iterator[str]:
    taught = [run for run in runs if run.command == "distill" and _list(run.figures.get("curve"))]
    if not taught:
        return
    yield "<h2>Learning curves</h2>"
    names = {run.id: f"{run.figures.get('name') or 'student'} {run.started[5:16]}" for run in taught}
    walked: list[Series] = []
    lost: list[Series] = []
    for run in taught[-MOST_SERIES:]:
        lines = [line for line in _list(run.figures.get("curve")) if isinstance(line, Mapping)]
        taus = [(line.get("step"), _at(line, "held_out", "tau")) for line in lines]
        losses = [(line.get("step"), line.get("loss")) for line in lines]
        for collected, pairs in ((walked, taus), (lost, losses)):
            points = tuple(Point(*pair) for one in pairs if len(pair := _numbers(one)) == 2)
            if points:
                collected.append(Series(names[run.id], points))
    for collected, what in ((walked, "τ of held-out walks"), (lost, "loss")):
        if collected:
            yield _picture(_lines(collected, what), what)
    yield _table(
        ("run", "outcome", "documents", "anchors", "best step", "chain", "native's chain", "held-out steps", "seconds"),
        (
            (
                names[run.id],
                run.outcome,
                _at(run.figures, "training", "documents"),
                _at(run.figures, "training", "anchors"),
                _at(run.figures, "training", "step"),
                _short(_at(run.figures, "evaluation", "student", "chain")),
                _short(_at(run.figures, "evaluation", "native", "chain")),
                _at(run.figures, "evaluation", "student", "steps"),
                _short(run.wall_seconds),
            )
            for run in taught
        ),
    )


def _lines(series: Sequence[Series], what: str) -> Callable[[Theme], bytes]:
    return lambda theme: plots.lines(series, "step", what, theme)


def _coverage(runs: Sequence[Run]) -> Iterator[str]:
    counted = [run for run in runs if run.command == "hot-vocab" and _is_mapping(run.figures.get("held_out"))]
    if not counted:
        return
    yield "<h2>Coverage of hot vocabularies</h2>"
    yield _note("Own tokens of held-out answers in the list; next j: of anchors, those whose next j tokens all are.")
    series = []
    for run in counted[-MOST_SERIES:]:
        points = [(j + 1, _share(one)) for j, one in enumerate(_reach(run))]
        if points:
            told = tuple(Point(j, share) for j, share in points if share is not None)
            series.append(Series(f"{run.figures.get('size')} ids {run.started[5:16]}", told))
    if series:
        yield _picture(lambda theme: plots.dots(series, "next j tokens", "all in the list", theme), "coverage")
    yield _table(
        ("when", "ids", "documents", "train", "held out", "held-out tokens", "next 1, 2, …"),
        (
            (
                run.started,
                run.figures.get("size"),
                run.figures.get("documents"),
                _short(_share(run.figures.get("train"))),
                _short(_share(run.figures.get("held_out"))),
                _at(run.figures, "held_out", "tokens"),
                ", ".join(_short(_share(one)) for one in _reach(run)),
            )
            for run in counted
        ),
    )


def _runs(runs: Sequence[Run]) -> Iterator[str]:
    yield "<h2>Every run</h2><p class='note'>running: no end is known, it was killed or is still at it.</p>"
    rows = []
    for run in runs:
        commit = str(_at(run.fields, "code", "commit") or _at(run.fields, "code", "version") or "")[:10]
        changed = "+" if _at(run.fields, "code", "changed") else ""
        memory = _numbers([_at(run.fields, "memory", "process_bytes")])
        detail = escape(json.dumps(run.fields, indent=1, ensure_ascii=False))
        rows.append(
            f"<tr><td>{_cell(run.started)}</td><td>{_cell(run.command)}</td>"
            f'<td class="{escape(run.outcome)}">{_cell(run.outcome)}</td><td>{_cell(run.reason)}</td>'
            f"<td>{_cell(_short(run.wall_seconds))}</td>"
            f"<td>{_cell(f'{memory[0] / 1e6:.0f}' if memory else '')}</td>"
            f"<td>{_cell(commit + changed)}</td>"
            f"<td><details><summary>all</summary><pre>{detail}</pre></details></td></tr>"
        )
    heads = ("when", "command", "outcome", "why", "seconds", "MB", "code", "line")
    yield _rows(heads, rows)


def _reach(run: Run) -> list[Any]:
    """Counts of the first kind, which is all documents."""
    kinds = _list(run.figures.get("reach"))
    return _list(kinds[0].get("runs")) if kinds and _is_mapping(kinds[0]) else []


def _picture(draw: Callable[[Theme], bytes], what: str) -> str:
    light, dark = (base64.b64encode(draw(theme)).decode() for theme in ("light", "dark"))
    data = "data:image/svg+xml;base64,"
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{data}{dark}">'
        f'<img alt="{escape(what)}" src="{data}{light}"></picture>'
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    return _rows(heads, ["<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>" for row in rows])


def _rows(heads: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return escape(f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value))


def _figure(told: Any) -> tuple[float, float | None, float | None, int] | None:
    """Value, interval and n of a figure as evaluations and promotions write them."""
    if not _is_mapping(told) or not (value := _numbers([told.get("value")])):
        return None
    ends = [found[0] if (found := _numbers([told.get(name)])) else None for name in ("low", "high")]
    n = told.get("n")
    return value[0], ends[0], ends[1], n if isinstance(n, int) else 0


def _interval(told: Any) -> str:
    figure = _figure(told)
    if figure is None:
        return "n/a"
    value, low, high, n = figure
    span = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return f"{value:.3f}{span} (n = {n})"


def _share(told: Any) -> float | None:
    pair = _numbers([told.get("covered"), told.get("tokens")]) if _is_mapping(told) else []
    return pair[0] / pair[1] if len(pair) == 2 and pair[1] else None


def _short(value: Any) -> str:
    found = _numbers([value])
    return f"{found[0]:.3f}" if found else "n/a"


def _numbers(values: Any) -> list[float]:
    """Those of the values that are numbers, of a size that can be drawn."""
    numbers = [one for one in _list(values) if isinstance(one, int | float) and not isinstance(one, bool)]
    return [float(one) for one in numbers if abs(one) <= _LARGEST]


def _at(told: Any, *names: str) -> Any:
    for name in names:
        told = told.get(name) if _is_mapping(told) else None
    return told


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)
