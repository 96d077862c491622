"""`serve`: one flag for every setting, then the process. Every error a user can cause is one line and exit code 2.

Imports what is heavy only once it is needed, so that --help and mistakes answer at once.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import sys
from collections.abc import Callable
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, get_args, get_origin

import typer

from serve import logs
from serve.settings import Settings, SettingsError, flag, load, variable

if TYPE_CHECKING:
    from backend.interface import ChatBackend
    from backend.loading import LocalOptions

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def main() -> None:
    """The console script."""
    # Torch's threads spin while they wait for each other; where the cores are busy with other work, decoding then
    # all but stops. It is read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        sys.exit(app(prog_name="serve", standalone_mode=False))
    except SettingsError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        # What typer raises for a wrong command line has no public class that all its versions share.
        if (described := getattr(error, "format_message", None)) is None:
            raise
        _fail(described())


def _serve(selftest: bool, **given: Any) -> int:
    """Serve a model over an OpenAI-compatible API, decoding speculatively and capturing what it says."""
    settings = load(**{name: value for name, value in given.items() if value not in (None, False, [])})
    logs.configure(settings.log_level, settings.log_format)
    return _selftest(settings) if selftest else _run(settings)


def _options() -> list[inspect.Parameter]:
    """A flag for every field of Settings. Values stay strings here; Settings alone knows what is valid."""
    parameters = []
    for name, field in Settings.model_fields.items():
        is_switch = field.annotation is bool
        default = "" if field.default in (None, ()) or is_switch else f" [default: {field.default}]"
        option = typer.Option(
            flag(name),
            help=f"{field.description}{default} [env: {variable(name)}]",
            show_default=False,
            metavar=None if is_switch else _metavar(field.annotation),
        )
        kind = list[str] if get_origin(field.annotation) is tuple else str
        annotation = Annotated[bool if is_switch else kind | None, option]  # type: ignore[valid-type]
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=False if is_switch else None, annotation=annotation
            )
        )
    return parameters


def _metavar(annotation: Any) -> str:
    """What stands for a value in --help: INTEGER, on|off, INTEGER|auto, TEXT,..."""
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    if get_origin(annotation) is tuple:
        return "TEXT,..."
    if kinds := [_metavar(kind) for kind in get_args(annotation) if kind is not NoneType]:
        return "|".join(kinds)
    return {int: "INTEGER", float: "NUMBER", str: "TEXT"}[annotation]


def _command() -> Callable[..., int]:
    """`_serve` with the signature that typer reads its flags from."""
    selftest = inspect.Parameter(
        "selftest",
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[
            bool, typer.Option("--selftest", help="Check that the model is read and decoded right, then exit.")
        ],
    )
    parameters = [*_options(), selftest]

    def serve(**given: Any) -> int:
        return _serve(**given)

    serve.__doc__ = _serve.__doc__
    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    serve.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return serve


app.command()(_command())


def make_backend(settings: Settings) -> ChatBackend:
    """The backend the settings ask for, not yet started. Raises BackendError for an upstream that is no URL."""
    if settings.upstream is not None:
        from backend.upstream.backend import UpstreamBackend, UpstreamOptions

        key = os.environ.get(variable("upstream_api_key"))
        return UpstreamBackend(
            UpstreamOptions(
                settings.upstream, settings.model, settings.served_model_name, key, settings.upstream_timeout
            )
        )

    from backend.local import LocalBackend

    return LocalBackend(_local_options(settings))


def _local_options(settings: Settings) -> LocalOptions:
    from backend.loading import LocalOptions, default_model

    return LocalOptions(
        model=settings.model or default_model(settings.device),
        device=settings.device,
        dtype=settings.dtype,
        drafter=settings.drafter,
        further_drafters=settings.further_drafters,
        drafter_dir=settings.drafter_dir,
        draft_tokens=settings.draft_tokens,
        threads=settings.threads,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        kv_memory=settings.kv_memory,
        prefix_cache=settings.prefix_cache == "on",
    )


def _selftest(settings: Settings) -> int:
    from backend.interface import BackendError
    from backend.selftest import run

    try:
        return int(run(_local_options(settings)))
    except BackendError as error:
        _fail(str(error))


def _run(settings: Settings) -> int:
    from serve.server import Certificate, ListenError, bind

    certificate = None
    try:
        if settings.tls_cert and settings.tls_key:
            certificate = Certificate(settings.tls_cert, settings.tls_key)
        listener = bind(settings.host, settings.port)
    except ListenError as error:
        _fail(str(error))

    from backend.interface import BackendError
    from capture.records import CaptureError
    from serve import server
    from serve.app import create_app
    from serve.record import open_writer

    try:
        writer = open_writer(settings)
        api = create_app(settings, make_backend(settings), writer)

        def greet() -> None:
            service, url = api.state.service, server.url(listener, "https" if certificate else "http")
            info = service.backend.info()
            key = """ -H "Authorization: Bearer $KEY\"""" if settings.api_key or settings.api_key_file else ""
            kept = "nothing is captured" if writer is None else f"captured in {writer.path}"
            typer.echo(
                f"{service.model_name} (drafter {info.drafter}, draft tokens {info.draft_tokens}) at {url}, {kept}"
            )
            typer.echo(
                f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' "
                """-d '{"messages": [{"role": "user", "content": "Write a function that reverses a string."}]}'"""
            )

        running = server.run(api, listener, grace=settings.shutdown_grace, on_ready=greet, certificate=certificate)
        flushed = asyncio.run(running)
    except (BackendError, CaptureError) as error:
        _fail(str(error))
    if not flushed:
        logging.getLogger(__name__).error("rows were given up: the capture file could not be written in time")
    return 0 if flushed else 1


def _fail(message: str) -> NoReturn:
    """One line on stderr, exit code 2."""
    sys.stderr.write(f"serve: {' '.join(message.split())}\n")
    sys.exit(2)
