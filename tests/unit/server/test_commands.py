"""The command line: help, exit codes, and messages of one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.server.cli import doctor
from tandemkv.server.cli.commands import app
from tandemkv.server.settings.flags import COMMON, SERVE_FLAGS

RANK_OPTIONS = """
    --policy --budget-tokens --resident-factor --recent-tokens --sink-tokens --fetch-cap
    --index-dtype --refresh-every --exact-layers --cache-tokens
    --max-running-requests --config
"""
SERVE_OPTIONS = f"""{RANK_OPTIONS}
    --cache-ranks --device --port --host --allow-remote --max-context --chunked-prefill-size
    --dtype --start-timeout-s --run-dir --print-settings --verbose SGLANG
"""
STATUS = {
    "ready": True,
    "inference_rank": {
        "role": "inference_rank",
        "ready": True,
        "epoch": 3,
        "values": {"late_packs_total": 2.0, "bytes_sent_total": 3145728.0, "exact_rows_total": 7.0},
        "info": {"policy": "look_ahead", "lost_reason": ""},
    },
    "cache_ranks": [
        {"values": {"resident_hits_total": 1234567.0, "slots_free": 9.0}, "epoch": 3, "ready": True}
    ],
}


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("COLUMNS", "200")
    return CliRunner()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.path == "/tandemkv/status"
        body = json.dumps(STATUS if known else {}).encode()
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server_url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("serve --help-all", SERVE_OPTIONS),
        ("cache-rank --help-all", f"{RANK_OPTIONS} --run-dir --model"),
        ("status --help", "--json --url http://127.0.0.1:30000"),
        ("model-path --help", "smollm2"),
        ("doctor --help", "--port"),
    ],
)
def test_help_mentions_every_option(runner: CliRunner, command: str, options: str) -> None:
    result = runner.invoke(app, command.split())
    assert result.exit_code == 0
    assert [option for option in options.split() if option not in result.output] == []


def options_in(text: str) -> list[str]:
    """Names of the options that a help lists; switch-offs and wrapped texts stand further right."""
    return re.findall(r"^│[ *]{1,4}(--[a-z][a-z0-9-]*)", text, re.MULTILINE)


@pytest.mark.parametrize("command", ["serve", "inference-rank", "cache-rank", "inspect", "plan"])
def test_help_has_what_a_user_needs_and_help_all_the_rest(
    runner: CliRunner, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short = runner.invoke(app, [command, "--help"]).output
    long = runner.invoke(app, [command, "--help-all"]).output
    assert runner.invoke(app, [command, "--help"]).output == short, "--help-all changes nothing"
    for text in (short, long):
        assert max(map(len, text.splitlines())) <= 80
        assert "…" not in text, "a name or a choice was cut"
        names = options_in(text)
        assert len(names) == len(set(names))
    common, every = options_in(short), options_in(long)
    assert len(common) <= 25
    assert set(common) < set(every)
    assert {"--policy", "--budget-tokens", "--set", "--help-all"} <= set(common)
    assert "For tuning" not in short
    assert "For tuning" in long


@pytest.mark.parametrize(
    "command",
    [
        "serve", "plan", "doctor", "status", "quality", "soak", "inspect", "calibrate", "policies",
        "cache-rank", "inference-rank", "memory", "link-keys", "bench decode", "bench serve", "",
        "bench", "alive", "model-path",
    ],
)  # fmt: skip
def test_types_are_shown_in_one_style(runner: CliRunner, command: str) -> None:
    output = runner.invoke(app, [*command.split(), "--help"]).output
    rows = [line for line in output.splitlines() if re.match(r"│[ *]+(--)?[a-z]", line)]
    assert any("--help" in line for line in rows)
    assert [line for line in rows if re.search(r" <[a-zA-Z\[\]| -]+> ", line)] == []


def test_every_option_has_a_text() -> None:
    def without(command: Any) -> list[str]:
        own = [f"{command.name} {x.name}" for x in command.params if not getattr(x, "help", None)]
        return own + [
            x for each in getattr(command, "commands", {}).values() for x in without(each)
        ]

    assert without(get_command(app)) == []


def test_a_sentence_of_a_help_is_not_broken(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = runner.invoke(app, ["soak", "--help"]).output.splitlines()
    told = [line.strip() for line in lines[: next(i for i, x in enumerate(lines) if "╭" in x)]]
    assert all(line.endswith(".") for line in told if line and not line.startswith("Usage"))


def test_the_whole_help_of_serve_has_every_flag(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = options_in(runner.invoke(app, ["serve", "--help-all"]).output)
    own = {"--config", "--print-settings", "--verbose", "--set", "--help-all", "--help"}
    assert set(names) == {flag.name for flag in SERVE_FLAGS} | own
    assert {flag.panel for flag in SERVE_FLAGS if flag.is_common} == set(COMMON)


def test_help_names_the_values_of_a_choice(runner: CliRunner) -> None:
    """Also of one that may be left open."""
    output = runner.invoke(app, ["serve", "--help-all"]).output
    output = " ".join(output.replace("│", " ").split())
    for option, values in (
        ("index-dtype", "native, int8 or int4; default: native"),
        ("predictor-dtype", "native or int8"),
    ):
        after = output.partition(f"--{option} ")[2]
        assert f"[{values}]" in after.partition(" --")[0], option


def test_prints_the_settings_as_yaml(runner: CliRunner) -> None:
    arguments = [
        "serve",
        "m",
        "--print-settings",
        "--budget-tokens",
        "512",
        "--heartbeat-misses",
        "5",
    ]
    result = runner.invoke(app, [*arguments, "--", "--log-level", "debug"])
    assert result.exit_code == 0
    printed = yaml.safe_load(result.stdout)
    assert printed["selection"]["budget_tokens"] == 512
    assert printed["exchange"]["heartbeat_misses"] == 5
    assert printed["sglang_args"] == ["--log-level", "debug"]


def test_prints_the_model_that_is_named_anywhere(runner: CliRunner, tmp_path: Path) -> None:
    config = tmp_path / "m.yaml"
    config.write_text("model: of-the-file\n")

    def printed(*words: str, env: dict[str, str] | None = None) -> str:
        result = runner.invoke(app, ["serve", *words, "--print-settings"], env=env)
        assert result.exit_code == 0
        return str(yaml.safe_load(result.stdout)["model"])

    environ = {"TANDEMKV_SERVE_MODEL": "of-the-environment"}
    given = ("--config", str(config))
    assert printed() == "smollm2"
    assert printed(*given) == "of-the-file"
    assert printed(*given, env=environ) == "of-the-environment"
    assert printed("of-the-flags", *given, env=environ) == "of-the-flags"
    config.write_text("model: 7\n")
    refused = runner.invoke(app, ["serve", *given, "--print-settings"])
    assert refused.exit_code == 2
    assert "model=7 (from " in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["serve"], 2, "no model given"),
        (["serve", "/nonexistent"], 2, "model=/nonexistent: no such directory"),
        (["serve", "m", "--budget-tokens", "5"], 2, "from --budget-tokens"),
        (["serve", "m", "--no-such-flag"], 2, "No such option"),
        (["serve", "m", "--set", "model=n"], 2, "MODEL and --set model set the same"),
        (["serve", "m", "--set", "sglang_args=--a", "--", "--b"], 2, "--set sglang_args set the s"),
        (["serve", "m", "--", "--lag", "2"], 2, "m: no such directory"),
        (["serve", "m", "--cache-ranks", "2", "--tp", "3"], 2, "use --cache-ranks 3"),
        (["serve", "m", "--", "--attention-backend", "triton"], 2, "--attention-backend"),
        (["serve", "m", "--port", "0", "--policy", "magic"], 2, "look_ahead"),
        (["soak", "--url", "http://127.0.0.1:9", "--", "--tp", "2"], 2, "in place of --url"),
        (["cache-rank"], 2, "--run-dir"),
        (["cache-rank", "--run-dir", "r"], 2, "with other commands --model MODEL"),
        (["cache-rank", "--run-dir=r", "--model=m", "--allow=::1"], 2, "add --address tcp://IP"),
        (["cache-rank", "--run-dir=r", "--model=m", "--link-keys=k"], 2, "add --address tcp://IP"),
        (["model-path", "gpt5"], 2, "there is smollm2"),
        (["status", "--url", "http://127.0.0.1:9"], 1, "is `tandemkv serve` running"),
        (["status", "--url", "localhost"], 1, "must begin with http"),
        (["inspect", "m", "--prompt-file", "/"], 2, "(Is a directory); give a text file"),
        (["inspect", "m", "--prompt-file=f", "--max-running-requests=2"], 2, "No such option"),
    ],
)
def test_exit_codes_and_messages(
    runner: CliRunner, arguments: list[str], code: int, expected: str
) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == code
    assert expected in result.stderr
    assert "Traceback" not in result.output


def test_link_keys_says_what_it_keeps(runner: CliRunner, tmp_path: Path) -> None:
    words = ["link-keys", str(tmp_path / "keys")]
    made = runner.invoke(app, words)
    assert (len(made.stdout.splitlines()), made.stderr) == (4, "")
    again = runner.invoke(app, words)
    assert (again.exit_code, again.stdout) == (0, "")
    assert [line[:6] for line in again.stderr.splitlines()] == ["kept: "] * 4
    (tmp_path / "keys" / "cache_rank.key_secret").unlink()  # it is on the other host
    theirs = runner.invoke(app, words)
    assert (theirs.stdout, len(theirs.stderr.splitlines())) == ("", 3)
    (tmp_path / "keys" / "cache_rank.key").unlink()
    half = runner.invoke(app, words)
    assert len(half.stdout.splitlines()) == 2
    assert "inference_rank.key_secret" in half.stderr


def test_a_rank_of_its_own_does_not_take_up_files_by_default(runner: CliRunner) -> None:
    text = " ".join(
        runner.invoke(app, ["inference-rank", "--help"]).output.replace("│", " ").split()
    )
    told = text.partition("--no-calibrated")[2].partition(" --")[0]
    assert "it is off" in text
    assert "[default: true]" not in told


def test_debug_shows_the_traceback(runner: CliRunner) -> None:
    result = runner.invoke(app, ["--debug", "serve", "/nonexistent"])
    assert result.exit_code == 2
    assert "Traceback" in result.stderr


def test_status_as_table_and_json(runner: CliRunner, server_url: str) -> None:
    shown = runner.invoke(app, ["status", "--url", server_url])
    assert shown.exit_code == 0
    for part in ("ready", "look_ahead", "1,234,567", "3.00 MiB", "slots free", "late packs"):
        assert part in shown.output
    assert "lost reason" not in shown.output
    printed = runner.invoke(app, ["status", "--json", "--url", f"{server_url}/"])
    assert json.loads(printed.stdout) == STATUS


def test_status_of_a_server_without_the_plugin(runner: CliRunner, server_url: str) -> None:
    result = runner.invoke(app, ["status", "--url", f"{server_url}/other"])
    assert result.exit_code == 1
    assert "without the tandemkv plugin" in result.stderr


def test_doctor_names_what_make_serve_needs_where_memory_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "available_bytes", lambda: None)
    assert doctor.check_memory().advice == "make sure that 7 GiB are free"


def test_doctor_takes_a_run_directory_that_serve_takes_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    for path in (private, Path("~/private")):
        assert doctor.check_run_dir(path).text == f"{private} is private to you"
    assert doctor.check_run_dir(Path("~no-such-user")).level == "fail"
    assert not list(private.iterdir())
    token = RunDir.create(private).token
    assert doctor.check_run_dir(private).level == "ok"
    assert RunDir.open(private).token == token
    assert doctor.check_run_dir(tmp_path / "a" / "b").text == f"can be made under {tmp_path / 'a'}"
    assert not (tmp_path / "a").exists()
    assert doctor.check_run_dir(None).level == "ok"
    private.chmod(0o750)
    assert doctor.check_run_dir(private).level == "fail"
    assert doctor.check_run_dir(private / "token" / "below").level == "fail"


@pytest.mark.parametrize(("level", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_doctor_exit_code(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, level: str, code: int
) -> None:
    finding = doctor.Finding("memory", level, "2 GiB", "add [some]")  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "run_checks", lambda **_: [finding])
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == code
    assert "add [some]" in result.output
    assert level in result.output


def test_a_reader_that_leaves_gets_no_error() -> None:
    """As `head` does, once it has its lines."""
    command = [sys.executable, "-P", "-m", "tandemkv.server", "policies"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1
