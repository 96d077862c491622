"""Every option of the server, once: a field here is a flag of `serve` and a DRAFTLOOP_* variable of the same name.

Knows no tensor and opens nothing; what an option means is decided where it is used.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

ENV_PREFIX = "DRAFTLOOP_"
MOST_DRAFT_TOKENS = 8
SECRETS = ("api_key", "admin_key")  # fields whose values are told to nobody


class SettingsError(Exception):
    """An option that cannot be used; `str(error)` is one line naming its flag and variable."""


_KINDS = ("mtp", "none", "prediction", "hot_vocab", "student")


def _drafter(name: str) -> str:
    """A kind and, after a colon, where it is; a directory is a student's."""
    match name.partition(":"):
        case ("mtp" | "none" | "prediction", "", ""):
            return name
        case ("hot_vocab" | "student", _, path) if path:
            return name
        case (kind, colon, _) if name and not (colon and kind in _KINDS) and ("/" in name or Path(name).is_dir()):
            return f"student:{name}"
    raise PydanticCustomError("drafter", "expected mtp, none, prediction, hot_vocab:FILE or a student's directory")


def _listed(names: object) -> object:
    """A flag or a variable lists its values with commas; a flag may also be given several times."""
    if isinstance(names, str):
        return tuple(name.strip() for name in names.split(","))
    if isinstance(names, list):
        return tuple(name.strip() for some in names for name in str(some).split(","))
    return names


def _lines(patterns: object) -> object:
    """A variable lists its values a line, for they may hold anything else; a flag may be given several times."""
    if isinstance(patterns, str):
        return tuple(line for line in patterns.splitlines() if line.strip())
    return tuple(patterns) if isinstance(patterns, list) else patterns


def _key(key: SecretStr) -> SecretStr:
    # A header carries it as it stands; more than that is not said, for an error is read by others.
    if not re.fullmatch("[!-~]+", key.get_secret_value()):
        raise PydanticCustomError("key", "expected keys of printable ASCII characters without spaces")
    return key


def _draft_tokens(count: object) -> object:
    numbers = [str(number) for number in range(MOST_DRAFT_TOKENS + 1)]
    if str(count) in ("auto", *numbers):
        return count
    raise PydanticCustomError("draft_tokens", "expected auto or 0 to {most}", {"most": MOST_DRAFT_TOKENS})


# What is asked of an engine of this process.
ENGINE = {
    *("device", "dtype", "threads", "max_model_len", "kv_memory", "prefix_cache"),
    *("drafter", "further_drafters", "drafter_dir", "allow_drafter_choice", "draft_tokens"),
}
_AT_FURTHER = {"field": "further_drafters"}
Drafter = Annotated[str, AfterValidator(_drafter)]
Name = Annotated[str, Field(min_length=1)]
Keys = Annotated[tuple[Annotated[SecretStr, AfterValidator(_key)], ...], NoDecode, BeforeValidator(_listed)]


class Settings(BaseSettings):
    """What the server was asked to do: given values first, then DRAFTLOOP_* variables, then the defaults below."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True)

    model: str | None = Field(
        None,
        description="tiny (bundled), a checkpoint directory, or a Hugging Face id. "
        "Unset: Qwen/Qwen3.5-9B where there is a GPU, tiny where there is none.",
    )
    upstream: str | None = Field(
        None,
        min_length=1,
        description="URL of another OpenAI server to stand in front of, in place of a model here; --model is then the "
        "name it has there for requests that name none. Its key is read from DRAFTLOOP_UPSTREAM_API_KEY alone.",
    )
    upstream_timeout: float = Field(
        600.0, gt=0, allow_inf_nan=False, description="Seconds of silence after which an upstream is given up."
    )
    served_model_name: Annotated[tuple[Name, ...], NoDecode, BeforeValidator(_listed)] = Field(
        (),
        description="The model's names in the API, separated by commas: answers carry the first, requests may say any. "
        "Unset: --model.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where to compute.")
    dtype: Literal["auto", "bfloat16", "float32"] = Field("auto", description="Precision of weights and activations.")
    drafter: Drafter = Field(
        "mtp",
        description="What proposes tokens: mtp (the model's own head), hot_vocab:FILE (that head cut to FILE's "
        "vocabulary), prediction (the client's prediction and what the prompt repeats), none, or the directory of a "
        "student that `training distill` has made.",
    )
    further_drafters: Annotated[tuple[Drafter, ...], NoDecode, BeforeValidator(_listed)] = Field(
        (),
        description="Drafters loaded beside --drafter, separated by commas: for the operator to promote and, with "
        "--allow-drafter-choice, for requests to choose.",
    )
    drafter_dir: str | None = Field(
        None,
        min_length=1,
        description="Directory from which the operator may load students while serving, with POST /v1/drafters. "
        "Unset: none are.",
    )
    allow_drafter_choice: bool = Field(False, description="Let a request name its drafter in the field drafter.")
    draft_tokens: Annotated[int | Literal["auto"], BeforeValidator(_draft_tokens)] = Field(
        2,
        description=f"Tokens proposed in each verify step, 0 to {MOST_DRAFT_TOKENS}; auto: as many as pay, from "
        "measured acceptance and cost.",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads. Unset: 1 for small models, else torch's choice.")
    max_model_len: int | None = Field(None, ge=2, description="Most tokens of prompt and answer. Unset: the model's.")
    max_num_seqs: int = Field(16, ge=1, description="Most requests decoded at a time; further ones wait.")
    kv_memory: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="GiB for cached keys, values and states. Unset: from the free memory.",
    )
    prefix_cache: Literal["on", "off"] = Field(
        "on", description="Reuse what was computed for a prompt where another one begins alike."
    )
    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    insecure: bool = Field(False, description="Allow an address other machines can reach, without any key.")
    tls_cert: str | None = Field(None, min_length=1, description="PEM file of the certificate chain, to serve HTTPS.")
    tls_key: str | None = Field(None, min_length=1, description="PEM file of the certificate's private key.")
    api_key: Keys = Field(
        (),
        description="Keys of which every request must give one, as Bearer token or x-api-key; each KEY or NAME=KEY, "
        "separated by commas. Captured generations carry the name. As a flag, other users here can see it.",
    )
    api_key_file: str | None = Field(None, min_length=1, description="File of further keys, one a line as --api-key's.")
    admin_key: Keys = Field(
        (),
        description="Keys for the operator, good for every endpoint. Unset: /v1/engine answers this machine's own "
        "clients only.",
    )
    metrics_auth: Literal["on", "off"] = Field(
        "on", description="Whether /metrics and the live page's figures need a key where the API does."
    )
    cors_origin: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_listed)] = Field(
        (), description="Origins whose pages may use the API from a browser, separated by commas, or *. Unset: none."
    )
    max_queued: int | None = Field(
        None,
        ge=0,
        description="Most requests that wait for one of --max-num-seqs; further ones get 429. Unset: no limit.",
    )
    max_body: float = Field(32.0, gt=0, allow_inf_nan=False, description="Most MiB of a request's body.")
    body_timeout: float = Field(
        60.0, gt=0, allow_inf_nan=False, description="Seconds a request's body may take to arrive."
    )
    request_timeout: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Most seconds from a request to its answer's end. Unset: no limit."
    )
    sse_keep_alive: float = Field(
        15.0, ge=0, allow_inf_nan=False, description="Seconds between comments in a stream that pauses; 0: none."
    )
    unknown_fields: Literal["ignore", "refuse"] = Field(
        "ignore", description="What to do with fields of a request that nobody here knows."
    )
    capture: str | None = Field(
        None,
        min_length=1,
        description="SQLite file that keeps every generation, or off. Unset: draftloop/capture.db in the user's data "
        "directory.",
    )
    capture_synchronous: Literal["FULL", "NORMAL"] = Field(
        "FULL", description="SQLite's synchronous mode. NORMAL is faster and may lose answers on power loss."
    )
    capture_commit_timeout: float = Field(
        2.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds a finished answer waits for its row to be committed before it is sent regardless.",
    )
    capture_queue_rows: int = Field(
        10_000,
        ge=1,
        description="Most rows that wait to be written. Beyond them a finished answer waits for room, at most "
        "--capture-commit-timeout; then its row is lost.",
    )
    capture_queue_memory: float = Field(
        256.0, gt=0, allow_inf_nan=False, description="Most MiB of rows that wait to be written."
    )
    capture_max_age: str | None = Field(
        None,
        min_length=1,
        description="Rows older than this are deleted while serving: 12h, 30d. Unset: kept until `capture prune`.",
    )
    capture_max_bytes: str | None = Field(
        None,
        min_length=1,
        description="The oldest rows are deleted while serving until all take no more than this: 500MB, 10GB.",
    )
    redact: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_lines)] = Field(
        (),
        description="Regular expression, or email, key, card, phone or ip, of what is taken out of rows before they "
        "are stored; may be given several times. A row with a match keeps no token ids.",
    )
    redact_file: str | None = Field(None, min_length=1, description="File of further such patterns, one a line.")
    shutdown_grace: float = Field(
        30.0, ge=0, allow_inf_nan=False, description="Seconds running requests may take to finish on SIGTERM or Ctrl-C."
    )
    metrics_compat: Literal["off", "vllm"] = Field(
        "off", description="Tell the figures of /metrics under vLLM's names too, for dashboards made for it."
    )
    log_level: Literal["critical", "error", "warning", "info", "debug"] = Field(
        "warning", description="What is logged to stderr; info includes one line per request, never what it said."
    )
    log_format: Literal["text", "json"] = Field("text", description="How it is logged: for people or for machines.")

    @model_validator(mode="after")
    def _drafters_can_be_told_apart(self) -> Self:
        # Students are told apart by their names, which stand in their files.
        given = (self.drafter, *self.further_drafters)
        kinds = [name if name.startswith("student:") else name.partition(":")[0] for name in given]
        if twice := next((kind for kind in kinds if kinds.count(kind) > 1), None):
            raise PydanticCustomError("drafter_twice", "{kind} is given twice", {**_AT_FURTHER, "kind": twice})
        return self

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if self.upstream is not None and (idle := sorted(self.model_fields_set & ENGINE)):
            raise PydanticCustomError("idle", "there is no engine here behind --upstream", {"field": idle[0]})
        return self

    @model_validator(mode="after")
    def _a_pair_of_files(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            missing, given = ("tls_key", "tls_cert") if self.tls_key is None else ("tls_cert", "tls_key")
            raise PydanticCustomError("tls", "{given} needs it", {"field": missing, "given": flag(given)})
        return self

    @model_validator(mode="after")
    def _no_open_door(self) -> Self:
        has_key = bool(self.api_key or self.api_key_file)
        if not (has_key or self.insecure or is_loopback(self.host)):
            raise PydanticCustomError(
                "insecure_host",
                "{host} is reachable from other machines and there is no --api-key; give one, or --insecure",
                {"field": "host", "host": self.host},
            )
        return self


def load(**given: object) -> Settings:
    """The settings from given values and the environment. Raises SettingsError."""
    try:
        return Settings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else str(first.get("ctx", {}).get("field"))
        got = f", got {first['input']!r}" if first["loc"] and name not in SECRETS else ""
        raise SettingsError(f"{flag(name)} ({variable(name)}): {first['msg']}{got}") from None


def flag(field: str) -> str:
    """The command line's spelling of a field."""
    return "--" + field.replace("_", "-")


def variable(field: str) -> str:
    """The environment's spelling of a field."""
    return ENV_PREFIX + field.upper()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to the host."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
