"""The live page's files, read once. They hold no figure: the page asks GET /v1/live for them, with a key if need be."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}

# What the page consists of, by name: media type and content.
FILES: Mapping[str, tuple[str, bytes]] = {
    file.name: (MEDIA_TYPES[suffix], file.read_bytes())
    for file in files(__name__).iterdir()
    if (suffix := file.name.rpartition(".")[2]) in MEDIA_TYPES
}
