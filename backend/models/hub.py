"""From what the user typed after --model to a directory: the bundled model, a local directory, or a hub id."""

from __future__ import annotations

import re
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

import backend.tiny
from backend.interface import BackendError

_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "merges.txt"]


def resolve_model(name: str) -> Path:
    """`tiny`, a directory, or an `owner/name` hub id (downloaded with a progress bar, or found in the cache).

    Raises BackendError in one line when there is no such model or it cannot be fetched.
    """
    if name == "tiny":
        return Path(backend.tiny.__file__).parent
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith((".", "~")):
        raise BackendError(f"no model at {name!r}: not a directory, and not an owner/name hub id")
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_FILES))
    except LocalEntryNotFoundError:
        raise BackendError(f"cannot reach the hub and {name!r} is not complete in its local cache") from None
    except HFValidationError as error:
        raise BackendError(f"{name!r} is not a valid hub id: {error}") from None
    except HfHubHTTPError as error:
        raise BackendError(f"the hub refused {name!r}: {str(error).splitlines()[0]}") from None
    except Exception as error:  # a transfer that breaks off raises what the client's HTTP library raises
        raise BackendError(f"cannot download {name!r}: {' '.join(str(error).split())}") from error
