"""`serve`'s command line: one flag and one variable per setting, and one line for every mistake."""

from __future__ import annotations

import re
import sys
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve import cli
from serve.settings import Settings, SettingsError, flag, is_loopback, load, variable

# A valid value of each field that is not its default.
VALUES = {
    "model": "org/name",
    "served_model_name": "mine",
    "device": "cpu",
    "dtype": "float32",
    "drafter": "hot_vocab:words.safetensors",
    "further_drafters": "none, prediction",
    "drafter_dir": "runs",
    "allow_drafter_choice": "true",
    "draft_tokens": "8",
    "threads": "3",
    "max_model_len": "512",
    "max_num_seqs": "4",
    "kv_memory": "1.5",
    "prefix_cache": "off",
    "host": "127.0.0.2",
    "port": "0",
    "insecure": "true",
    "tls_cert": "cert.pem",
    "tls_key": "key.pem",
    "api_key": "me=a-key, another",
    "api_key_file": "keys",
    "admin_key": "root=mine",
    "metrics_auth": "off",
    "cors_origin": "https://a.example, https://b.example",
    "max_queued": "0",
    "max_body": "0.5",
    "body_timeout": "7",
    "request_timeout": "90",
    "sse_keep_alive": "0",
    "capture": "off",
    "capture_synchronous": "NORMAL",
    "capture_commit_timeout": "0.5",
    "capture_queue_rows": "5",
    "capture_queue_memory": "0.5",
    "capture_max_age": "30d",
    "capture_max_bytes": "10GB",
    "redact": "email",
    "redact_file": "patterns",
    "shutdown_grace": "1.5",
    "unknown_fields": "refuse",
    "upstream": "http://localhost:1/v1",
    "upstream_timeout": "9",
    "metrics_compat": "vllm",
    "log_level": "debug",
    "log_format": "json",
}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in Settings.model_fields:
        monkeypatch.delenv(variable(name), raising=False)


@pytest.fixture
def parse(monkeypatch):
    """The settings that a command line leads to; nothing is started."""

    def parse(*arguments: str) -> Settings:
        seen: list[Settings] = []
        monkeypatch.setattr(cli, "_run", lambda settings: seen.append(settings) or 0)
        monkeypatch.setattr(sys, "argv", ["serve", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0
        return seen[0]

    return parse


def test_every_setting_is_tried_below():
    assert VALUES.keys() == Settings.model_fields.keys()


@pytest.mark.parametrize("name", VALUES)
def test_every_setting_has_its_flag_and_its_variable(parse, monkeypatch, name):
    default = getattr(parse(), name)
    for pair in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
        if pair[0] == name:
            monkeypatch.setenv(variable(pair[1]), "other.pem")
            default = None
    is_switch = Settings.model_fields[name].annotation is bool
    by_flag = parse(flag(name), *([] if is_switch else [VALUES[name]]))
    monkeypatch.setenv(variable(name), VALUES[name])
    assert getattr(by_flag, name) == getattr(parse(), name) != default


def test_the_names_are_the_documented_ones():
    assert (flag("draft_tokens"), variable("draft_tokens")) == ("--draft-tokens", "DRAFTLOOP_DRAFT_TOKENS")


def test_a_flag_wins_over_its_variable(parse, monkeypatch):
    monkeypatch.setenv("DRAFTLOOP_PORT", "1234")
    assert parse("--port", "4321").port == 4321


def test_an_empty_variable_is_none(parse, monkeypatch):
    monkeypatch.setenv("DRAFTLOOP_CAPTURE", "")
    assert parse().capture is None


def test_help_names_every_flag_variable_default_and_choice(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["serve", "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    for name, field in Settings.model_fields.items():
        assert flag(name) in told
        assert variable(name) in told
        if field.default not in (None, False, ()):
            assert f"[default: {field.default}]" in told
        choices = [choice for choice in get_args(field.annotation) if isinstance(choice, str)]
        assert not choices or "|".join(choices) in told
    assert "--draft-tokens INTEGER|auto" in told
    assert "--selftest" in told


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--port", "70000"], "--port (DRAFTLOOP_PORT)"),
        (["--port", "http"], "--port"),
        (["--draft-tokens", "9"], "--draft-tokens"),
        (["--draft-tokens", "-1"], "--draft-tokens"),
        (["--draft-tokens", "many"], "expected auto or 0 to 8"),
        (["--drafter", "student"], "--drafter"),
        (["--drafter", "hot_vocab"], "hot_vocab:FILE"),
        (["--drafter", "hot_vocab:"], "hot_vocab:FILE"),
        (["--drafter", "mtp:file"], "--drafter"),
        (["--drafter", "mtp:some/file"], "--drafter"),
        (["--drafter", "student:"], "a student's directory"),
        (["--further-drafters", "none,student"], "--further-drafters"),
        (["--further-drafters", "none,"], "--further-drafters"),
        (["--further-drafters", "none,mtp"], "mtp is given twice"),
        (["--drafter", "hot_vocab:a", "--further-drafters", "hot_vocab:b"], "given twice"),
        (["--drafter", "./one", "--further-drafters", "student:./one"], "student:./one is given twice"),
        (["--kv-memory", "0"], "--kv-memory"),
        (["--kv-memory", "nan"], "--kv-memory"),
        (["--prefix-cache", "maybe"], "--prefix-cache"),
        (["--capture-commit-timeout", "inf"], "--capture-commit-timeout"),
        (["--shutdown-grace", "-1"], "--shutdown-grace"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--port"], "--port"),
        (["stray"], "stray"),
        (["--api-key", ""], "--api-key (DRAFTLOOP_API_KEY)"),
        (["--api-key", "a,,b"], "--api-key"),
        (["--api-key", "two words"], "--api-key"),
        (["--admin-key", "schlüssel"], "--admin-key"),
        (["--tls-cert", "cert.pem"], "--tls-key (DRAFTLOOP_TLS_KEY)"),
        (["--tls-key", "key.pem"], "--tls-cert (DRAFTLOOP_TLS_CERT)"),
        (["--max-queued", "-1"], "--max-queued"),
        (["--max-body", "0"], "--max-body"),
        (["--body-timeout", "0"], "--body-timeout"),
        (["--request-timeout", "inf"], "--request-timeout"),
        (["--sse-keep-alive", "-1"], "--sse-keep-alive"),
        (["--log-format", "xml"], "--log-format"),
        (["--host", "0.0.0.0"], "--insecure"),
        (["--host", "::"], "--insecure"),
        (["--host", "192.168.1.1"], "--insecure"),
        (["--host", "example.org"], "--insecure"),
    ],
)
def test_a_mistake_is_one_line_naming_it_and_exit_code_2(monkeypatch, capsys, arguments, named):
    monkeypatch.setattr(cli, "_run", lambda settings: 0)  # a mistake that is let through must not start a server
    assert_refused(monkeypatch, capsys, arguments, named)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--host", "no such host", "--insecure"], "no such host"),
        (["--api-key-file", "no/such/file"], "no/such/file"),
        (["--api-key", "twice,twice"], "given twice"),
        (["--tls-cert", "no/cert.pem", "--tls-key", "no/key.pem"], "no/cert.pem"),
        (["--tls-cert", __file__, "--tls-key", __file__], "PEM"),
    ],
)
def test_what_only_the_start_can_tell_is_one_line_too(monkeypatch, capsys, arguments, named):
    assert_refused(monkeypatch, capsys, [*arguments, "--port", "0", "--capture", "off"], named)


def assert_refused(monkeypatch, capsys, arguments: list[str], named: str) -> None:
    monkeypatch.setattr(sys, "argv", ["serve", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"serve: [^\n]+\n", err)
    assert named in err


def test_a_wrong_variable_is_named_too(monkeypatch, capsys):
    monkeypatch.setenv("DRAFTLOOP_PORT", "many")
    monkeypatch.setattr(sys, "argv", ["serve"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "DRAFTLOOP_PORT" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["auto", *range(9)])
def test_draft_tokens_are_a_number_or_auto(parse, given):
    assert parse("--draft-tokens", str(given)).draft_tokens == given


def test_further_drafters_are_split_at_commas(parse):
    settings = parse("--further-drafters", "hot_vocab:a b.safetensors , none")
    assert settings.further_drafters == ("hot_vocab:a b.safetensors", "none")
    assert not settings.allow_drafter_choice  # they can be promoted without


def test_a_directory_is_a_students(parse, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("here", "student"):  # the latter is what `training distill` makes unless told otherwise
        (tmp_path / name).mkdir()
    assert parse("--drafter", "student").drafter == "student:student"
    settings = parse("--drafter", "here", "--further-drafters", "students/a:b,student:elsewhere,~/c,mtp")
    assert settings.drafter == "student:here"
    assert settings.further_drafters == ("student:students/a:b", "student:elsewhere", "student:~/c", "mtp")


def test_a_mistake_in_a_key_does_not_tell_the_key(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["serve", "--api-key", "me=my secret,other"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "secret" not in capsys.readouterr().err
    assert "secret" not in repr(load(api_key="me=mysecret", admin_key="myothersecret"))


def test_keys_may_be_given_one_flag_each(parse):
    settings = parse("--api-key", "a=1", "--api-key", "b=2,c=3")
    assert [key.get_secret_value() for key in settings.api_key] == ["a=1", "b=2", "c=3"]


@pytest.mark.parametrize("key", [("--api-key", "a-key"), ("--api-key-file", "keys")])
def test_a_key_allows_any_address_and_an_admin_key_does_not(parse, key):
    assert parse("--host", "0.0.0.0", *key).host == "0.0.0.0"
    with pytest.raises(SettingsError, match="--insecure"):
        load(host="0.0.0.0", admin_key="an-admin-key")


def test_insecure_allows_any_address(parse):
    assert parse("--host", "0.0.0.0", "--insecure").host == "0.0.0.0"


@given(st.ip_addresses())
def test_only_loopback_addresses_need_no_permission(address):
    def settings(**more: Any) -> Settings:
        return load(host=str(address), **more)

    if is_loopback(str(address)):
        assert str(address).startswith("127.") or str(address) == "::1" or address.ipv4_mapped.is_loopback
        assert settings().host == str(address)
    else:
        with pytest.raises(SettingsError, match="--insecure"):
            settings()
        assert settings(insecure=True).host == str(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.9.1"])
def test_this_machine_needs_no_permission(host):
    assert load(host=host).host == host
