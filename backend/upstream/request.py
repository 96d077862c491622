"""What an upstream is asked beyond the client's own body, and how it is hidden from a client that did not ask for it.

Token ids and usage are for our books. Which of them an upstream refuses is learned once; knows no connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

USAGE = "stream_options"
# Names for "tell the token ids", and the fields that then tell them: vLLM's and llama.cpp's.
IDS: Mapping[str, tuple[str, ...]] = {
    "return_token_ids": ("prompt_token_ids", "token_ids"),
    "return_tokens": ("tokens",),
}
Extras = frozenset[str]


class Manners:
    """What one endpoint of an upstream takes: an extra is refused, proven, or still to be tried."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self._proven: set[str] = set()

    def extras(self, body: Mapping[str, Any], stream: bool) -> Extras:
        """What to ask for that the client has not asked for itself."""
        wanted = {name for name in IDS if not body.get(name)}
        if stream and options(body).get("include_usage") is not True:
            wanted.add(USAGE)
        return frozenset(wanted - self.refused)

    def fewer(self, asked: Extras, refusal: str) -> Extras | None:
        """What to ask for after a refusal of the request; None where no extra can be what was wrong with it."""
        untried = asked - self._proven
        if not untried:
            return None
        # Servers name the field that they do not know; one that does not may mean any.
        named = {name for name in untried if name in refusal or (name == USAGE and "include_usage" in refusal)}
        return asked - (named or untried)

    def learn(self, asked: Extras, dropped: Extras) -> None:
        """The request was taken with these, after it was refused with those too."""
        self._proven |= asked
        self.refused |= dropped - self._proven


def options(body: Mapping[str, Any]) -> Mapping[str, Any]:
    given = body.get("stream_options")
    return given if isinstance(given, Mapping) else {}


def compose(body: Mapping[str, Any], extras: Extras, model: str | None) -> dict[str, Any]:
    """The body to send: the client's, with the model's name at the upstream where it is not the client's word."""
    sent = dict(body)
    if model is not None:
        sent["model"] = model
    if USAGE in extras:
        sent["stream_options"] = {**options(body), "include_usage": True}
    return sent | dict.fromkeys(sorted(extras - {USAGE}), True)


def hide(answer: dict[str, Any], extras: Extras) -> None:
    """Take out of an answer, or a chunk of one, what only we asked for."""
    hidden = [field for name in extras for field in IDS.get(name, ())]
    for part in (answer, *choices(answer)):
        for name in hidden:
            part.pop(name, None)
    if USAGE in extras:
        answer.pop("usage", None)


def choices(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The choices of an answer or a chunk, as far as they are any."""
    given = answer.get("choices")
    return [choice for choice in given if isinstance(choice, dict)] if isinstance(given, list) else []
