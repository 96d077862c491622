"""Text taken out of a generation by patterns, before it is stored or afterwards; the JSON in it stays valid JSON.

Knows where a generation holds what people wrote; knows no file. What may hold it unseen goes with it: token ids,
log-probabilities, seed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from capture.records import CaptureError, Generation

PLACEHOLDER = "[redacted]"
# Linear in the text's length whatever it is: clients choose it.
BUILT_IN: Mapping[str, str] = {
    "email": r"(?<![\w.+-])[\w.+-]++@[\w-]++(?:\.[\w-]++)+",
    "key": r"(?<![\w-])(?:(?:sk|pk|rk|hf|gh[opsur]|github_pat|glpat|xox[abeoprs]|npm|AIza)[\w-]{16,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|eyJ[\w-]{8,}+\.[\w-]{8,}+\.[\w-]{8,}+)|(?i:bearer) [\w.~+/-]{16,}=*",
    "card": r"(?<![\d.])(?:\d{14,16}|\d{4}(?:[ -]\d{4}){3}|\d{4}[ -]\d{6}[ -]\d{5})(?!\d)",
    "phone": r"(?<![\w+])\+\d[\d ().-]{6,18}\d(?!\d)",
    "ip": r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])|(?<![\w:])(?:[0-9A-Fa-f]{1,4}:){3,7}:?[0-9A-Fa-f]{1,4}(?![\w:])",
}
# Below these, keys and numbers are the client's own, and searched as its texts are. Elsewhere they are the API's: keys
# that are words, and the values of role and type.
OWN_KEYS = {"metadata", "arguments", "chat_template_kwargs"}
KINDS = {"role", "type"}
WORD = re.compile(r"[A-Za-z_$]\w*", re.ASCII)


class PatternError(CaptureError):
    """A pattern that cannot be used."""


@dataclass(frozen=True)
class Redactor:
    """Replaces what any of its patterns matches by `[redacted]`; what was replaced before is never matched again."""

    patterns: tuple[re.Pattern[str], ...]

    def generation(self, row: Generation) -> Generation:
        """The generation with nothing of a match in it, and how much was replaced in `redacted`; itself where none is.

        Searched: answer, reasoning, tool calls, model, error, client, and every text of the request (content, prompts,
        user, metadata, ...) and of the parameters. A prompt given as token ids cannot be searched: it counts as one.
        """
        found = _Pass(self.patterns)
        clean = {
            "response_text": found.text(row.response_text),
            "reasoning": found.text(row.reasoning),
            "tool_calls": found.json(list(row.tool_calls)),
            "model": found.text(row.model),
            "error": row.error and found.text(row.error),
            "client": row.client and found.text(row.client),
            "parameters": found.json(dict(row.parameters)),
            "request": found.json(_without_ids(row.request, found)),
        }
        if not found.count:
            return row
        for name in ("parameters", "request"):
            clean[name].pop("seed", None)
        clean["parameters"]["redacted"] = row.redacted + found.count
        return replace(
            row, **clean, prompt_tokens=None, completion_tokens=None, logprobs=None, seed=None, split_key_length=0
        )


def redactor(patterns: Sequence[str], file: Path | None = None) -> Redactor | None:
    """Of regular expressions and names in BUILT_IN, those of a file too (one a line, # begins a comment line).

    None where there are none. Raises PatternError.
    """
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise PatternError(f"cannot read patterns from {file}: {reason}") from None
        listed = [line for line in lines if line.strip() and not line.startswith("#")]
        if not listed:
            raise PatternError(f"there is no pattern in {file}")
        patterns = [*patterns, *listed]
    return Redactor(tuple(_compiled(pattern) for pattern in patterns)) if patterns else None


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(BUILT_IN.get(pattern, pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise PatternError(f"{pattern!r} is no regular expression: {error}") from None
    if compiled.search(""):
        raise PatternError(f"{pattern!r} matches the empty text, so everywhere")
    return compiled


@dataclass
class _Pass:
    """One walk over one generation, counting what it replaces."""

    patterns: tuple[re.Pattern[str], ...]
    count: int = 0

    def text(self, text: str) -> str:
        """A text; where it is a JSON object or array as a whole, that is searched inside and stays one."""
        if text.lstrip()[:1] in ("{", "["):
            try:
                return self._json_text(text)
            except (ValueError, RecursionError):
                pass  # no JSON, after all
        return self._plain(text)

    def json(self, value: Any, key: str = "", own_keys: bool = False) -> Any:
        """A JSON value with its texts searched, and under a client's own keys those too, and numbers as written."""
        match value:
            case str():
                kind = not own_keys and key in KINDS and WORD.fullmatch(value)
                return value if kind else self.text(value)
            case int() | float() if own_keys and not isinstance(value, bool):
                written = self._plain(json.dumps(value))
                return value if PLACEHOLDER not in written else written
            case dict():
                return dict(self._pairs(value, own_keys))
            case list() | tuple():
                return [self.json(inner, key, own_keys) for inner in value]
        return value

    def _json_text(self, text: str) -> str:
        before = self.count
        inside = self.json(json.loads(text), own_keys=True)
        written = text if self.count == before else json.dumps(inside, ensure_ascii=False)
        # A match may reach from a key to its value, or stand in what a repeated key hides.
        if self._found_in(written):
            self.count += 1
            return json.dumps([PLACEHOLDER])
        return written

    def _pairs(self, value: dict[str, Any], own_keys: bool) -> Iterator[tuple[str, Any]]:
        taken: set[str] = set()
        for name, inner in value.items():
            fresh = clean = self._plain(name) if own_keys or not WORD.fullmatch(name) else name
            while fresh in taken:  # two keys may become one: neither value is dropped
                fresh = f"{clean} {len(taken)}"
            taken.add(fresh)
            yield fresh, self.json(inner, name, own_keys or name in OWN_KEYS)

    def _plain(self, text: str) -> str:
        for pattern in self.patterns:
            text = PLACEHOLDER.join(pattern.sub(self._replacement, part) for part in text.split(PLACEHOLDER))
        return text

    def _replacement(self, found: re.Match[str]) -> str:
        if not found[0]:
            return ""
        self.count += 1
        return PLACEHOLDER

    def _found_in(self, text: str) -> bool:
        parts = text.split(PLACEHOLDER)
        return any(found[0] for part in parts for pattern in self.patterns for found in pattern.finditer(part))


def _without_ids(request: Mapping[str, Any], found: _Pass) -> dict[str, Any]:
    """The request, a prompt of token ids taken out of it."""
    prompt = request.get("prompt")
    if isinstance(prompt, list) and any(isinstance(part, int | list) for part in prompt):
        found.count += 1
        return {**request, "prompt": PLACEHOLDER}
    return dict(request)
