"""Conversations about a fact: what a user might ask, and the answer in one regular form per kind of question.

Pure text from a `Fact` and a random generator; knows no tokenizer. Answers stay under about 200 tokens.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from training.pretraining.conversation import Conversation, Turn, with_reasoning
from training.pretraining.sources import Fact

Asker = Callable[[Fact, random.Random], "Turn | None"]

_WHAT = (
    "What does `{p}` do?",
    "What is `{p}`?",
    "Explain `{p}`.",
    "Tell me about `{p}`.",
    "What is `{p}` for?",
    "Describe `{p}` in one sentence.",
)
_ARGUMENTS = (
    "Which arguments does `{p}` take?",
    "What are the arguments of `{p}`?",
    "List the parameters of `{p}`.",
    "What can I pass to `{p}`?",
)
_SIGNATURE = ("What is the signature of `{p}`?", "Show the signature of `{p}`.", "How is `{p}` declared?")
_WHERE = (
    "Which module has `{n}`?",
    "Where do I find `{n}`?",
    "How do I import `{n}`?",
    "In which module is `{n}` defined?",
)
_SHOW = (
    "Show how `{p}` is implemented.",
    "How is `{p}` implemented?",
    "Show the source of `{p}`.",
    "Write `{n}` from `{m}`.",
)
_CALL = ("How do I call `{p}`?", "Show an example call of `{p}`.", "How do I use `{p}`?")
_EXPLAIN_CODE = (
    "What does this function do?\n\n{c}",
    "Explain this code.\n\n{c}",
    "{c}\n\nWhat does it do?",
    "Describe this function in one sentence.\n\n{c}",
)
_CODE_ARGUMENTS = (
    "Which arguments does this function take?\n\n{c}",
    "List the parameters of this function.\n\n{c}",
    "{c}\n\nWhat are its arguments?",
)
_DOCSTRING = (
    "Add a docstring to this function.\n\n{c}",
    "Write a docstring for this function.\n\n{c}",
    "Document this code.\n\n{c}",
)
_RENAME = (
    "Rename the function to `{new}`.\n\n{c}",
    "Change the name of this function to `{new}`.\n\n{c}",
    "{c}\n\nRename it to `{new}`.",
)
_WRITE = (
    "Write a {k} `{n}({a})`. {s}",
    "Write a Python {k} named `{n}` with the arguments `({a})`. {s}",
    "Implement `{n}({a})`: {s}",
)
_MEMBERS = {
    "class": ("Which methods does `{p}` have?", "List the methods of `{p}`.", "What can I do with a `{p}`?"),
    "module": ("What is in the `{p}` module?", "List some names in `{p}`.", "What does the `{p}` module offer?"),
}
_OVERVIEW = ("Explain `{p}` in detail.", "Give me an overview of `{p}`.", "Teach me how to use `{p}`.")
_NEW_NAMES = ("compute", "process", "run", "helper", "build", "convert", "check", "apply", "load", "update", "find")


def fenced(code: str) -> str:
    """A Markdown code block."""
    return f"```python\n{code}\n```"


def arguments(fact: Fact) -> str:
    """The argument list as written in a signature, without annotations."""
    return ", ".join(f"{p.name}={p.default}" if p.default else p.name for p in fact.parameters)


def _kind(fact: Fact) -> str:
    owner = fact.path.rsplit(".", 2)[-2] if fact.kind == "method" else ""
    return {
        "function": f"a function in the `{fact.module}` module",
        "class": f"a class in the `{fact.module}` module",
        "method": f"a method of `{owner}` in the `{fact.module}` module",
        "module": "a Python module",
    }[fact.kind]


def _turn(fact: Fact, rng: random.Random, questions: tuple[str, ...], answer: str, **extra: str) -> Turn:
    template = rng.choice(questions)
    return Turn(template.format(p=fact.path, n=fact.name, m=fact.module, **extra), answer)


def _bullets(fact: Fact, subject: str) -> str:
    shown = fact.parameters[:8]
    if not shown:
        return f"{subject} takes no arguments."
    lines = []
    for p in shown:
        kind = f" (`{p.annotation}`)" if p.annotation else ""
        default = f", default `{p.default}`" if p.default else ""
        lines.append(f"- `{p.name}`{kind}{default}")
    count = len(fact.parameters)
    noun = "argument" if count == 1 else "arguments"
    more = ", among them" if count > len(shown) else ""
    return f"{subject} takes {count} {noun}{more}:\n\n" + "\n".join(lines)


def what(fact: Fact, rng: random.Random) -> Turn | None:
    if not fact.summary:
        return None
    return _turn(fact, rng, _WHAT, f"`{fact.path}` is {_kind(fact)}. {fact.summary}")


def takes(fact: Fact, rng: random.Random) -> Turn | None:
    if fact.kind == "module":
        return None
    return _turn(fact, rng, _ARGUMENTS, _bullets(fact, f"`{fact.path}`"))


def signature(fact: Fact, rng: random.Random) -> Turn | None:
    if fact.kind not in ("function", "method") or len(arguments(fact)) > 200:
        return None
    return _turn(fact, rng, _SIGNATURE, fenced(f"def {fact.name}({arguments(fact)})"))


def where(fact: Fact, rng: random.Random) -> Turn | None:
    if fact.kind not in ("function", "class"):
        return None
    answer = f"`{fact.name}` is in the `{fact.module}` module.\n\n" + fenced(f"from {fact.module} import {fact.name}")
    return _turn(fact, rng, _WHERE, answer)


def show(fact: Fact, rng: random.Random) -> Turn | None:
    return _turn(fact, rng, _SHOW, fenced(fact.code)) if fact.code else None


def call(fact: Fact, rng: random.Random) -> Turn | None:
    if fact.kind not in ("function", "class"):
        return None
    required = [p.name for p in fact.parameters if not p.default and not p.name.startswith("*")]
    line = f"result = {fact.module}.{fact.name}({', '.join(required)})"
    return _turn(fact, rng, _CALL, fenced(f"import {fact.module}\n\n{line}")) if len(line) < 120 else None


def members(fact: Fact, rng: random.Random) -> Turn | None:
    if fact.kind not in _MEMBERS or not fact.members:
        return None
    lines = "\n".join(f"- `{name}`" for name in fact.members[:8])
    verb = "has these methods" if fact.kind == "class" else "offers these names"
    return _turn(fact, rng, _MEMBERS[fact.kind], f"`{fact.path}` {verb}:\n\n{lines}")


def overview(fact: Fact, rng: random.Random) -> Turn | None:
    description, listed, example = what(fact, rng), takes(fact, rng), call(fact, rng)
    if not (description and listed and example):
        return None
    takes_it = listed.answer.replace(f"`{fact.path}` takes", "It takes", 1)
    answer = f"{description.answer}\n\n{takes_it}\n\nFor example:\n\n{example.answer}"
    return _turn(fact, rng, _OVERVIEW, answer)


def explain_code(fact: Fact, rng: random.Random) -> Turn | None:
    if not (fact.code and fact.summary):
        return None
    return _turn(fact, rng, _EXPLAIN_CODE, f"This is `{fact.name}`. {fact.summary}", c=fenced(fact.code))


def code_arguments(fact: Fact, rng: random.Random) -> Turn | None:
    if not fact.code:
        return None
    return _turn(fact, rng, _CODE_ARGUMENTS, _bullets(fact, f"`{fact.name}`"), c=fenced(fact.code))


def docstring(fact: Fact, rng: random.Random) -> Turn | None:
    if not (fact.code and fact.summary) or len(fact.code) > 300:
        return None
    head, _, body = fact.code.partition("\n")
    documented = f'{head}\n    """{fact.summary}"""\n{body}'
    return _turn(fact, rng, _DOCSTRING, fenced(documented), c=fenced(fact.code))


def rename(fact: Fact, rng: random.Random) -> Turn | None:
    if not fact.code or len(fact.code) > 300:
        return None
    new = rng.choice(_NEW_NAMES)
    renamed = re.sub(rf"\bdef {fact.name}\b", f"def {new}", fact.code, count=1)
    return _turn(fact, rng, _RENAME, fenced(renamed), c=fenced(fact.code), new=new)


def write(fact: Fact, rng: random.Random) -> Turn | None:
    if not (fact.code and fact.summary):
        return None
    names = ", ".join(p.name for p in fact.parameters)
    return _turn(fact, rng, _WRITE, fenced(fact.code), k=fact.kind, a=names, s=fact.summary)


# Weights: the share of a kind among the questions a fact can answer.
KINDS: dict[Asker, float] = {
    what: 3.0,
    takes: 2.0,
    signature: 1.0,
    where: 1.5,
    show: 1.0,
    call: 1.0,
    overview: 2.5,
    members: 1.5,
    explain_code: 1.5,
    code_arguments: 1.5,
    docstring: 1.0,
    rename: 1.0,
    write: 1.0,
}
_FOLLOW_UPS: tuple[tuple[Asker, tuple[str, ...]], ...] = (
    (takes, ("Which arguments does it take?", "What are its arguments?")),
    (what, ("What does it do?", "And what is it for?")),
    (call, ("How do I call it?", "Show an example.")),
    (where, ("How do I import it?", "Where is it?")),
    (members, ("What does it have?", "List its members.")),
)


def ask(fact: Fact, rng: random.Random) -> Conversation | None:
    """A conversation of 1 … 3 turns about `fact`; None where it has nothing to say."""
    kinds = list(KINDS)
    first = rng.choices(kinds, [KINDS[kind] for kind in kinds])[0]
    turn = first(fact, rng)
    if turn is None:
        return None
    turns = [turn]
    if rng.random() < 0.2:
        for kind, questions in rng.sample(_FOLLOW_UPS, k=rng.choice((1, 1, 2))):
            more = kind(fact, rng) if kind is not first else None
            if more is not None:
                turns.append(Turn(rng.choice(questions), more.answer))
    return with_reasoning(Conversation(tuple(turns)), f"The question is about `{fact.path}`.", rng)
