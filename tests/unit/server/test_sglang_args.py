"""Which of SGLang's arguments and variables are refused, compared with its own parser."""

from __future__ import annotations

import argparse

import pytest
from sglang.srt.server_args import ServerArgs

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.settings.refused_args import (
    ALLOWED,
    ALLOWED_FAMILY,
    FAMILIES,
    NEVER,
    ONLY,
    ONLY_ON_CPU,
    REFUSED,
)
from tandemkv.server.settings.sglang_args import (
    check_sglang_args,
    check_sglang_environment,
    why_refused,
)

_NOT_IN_0_5_17 = {
    "--enable-hicache", "--enable-kv-cache-sharding", "--enable-layernorm-sp",
    "--enable-nvidia-megakernel", "--enable-amd-monokernel", "--monokernel-backend",
    "--enable-unified-cache-external-linker", "--startup-weight-load-mode", "--attn-dp-size",
    "--attention-data-parallel-size", "--load-publish-endpoint", "--gated-launch-port",
}  # fmt: skip
_GONE_BY_0_5_23 = {
    "--enforce-piecewise-cuda-graph", "--enable-breakable-cuda-graph",
    "--enable-dsa-prefill-context-parallel", "--enable-nsa-prefill-context-parallel",
    "--enable-prefill-context-parallel",
}  # fmt: skip


@pytest.fixture(scope="module")
def actions() -> list[argparse.Action]:
    """The arguments of the installed SGLang."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return [action for action in parser._actions if action.dest != "help"]


def _is_bounded(name: str) -> bool:
    """Whether an argument, by its whole name, is refused or may not have every value."""
    return why_refused(name) is not None or any(name in of for of in (ONLY, ONLY_ON_CPU, NEVER))


def test_every_name_is_one_of_sglang(actions: list[argparse.Action]) -> None:
    """A misspelt one would refuse nothing."""
    known = {name for action in actions for name in action.option_strings}
    named = {*REFUSED, *ONLY, *ONLY_ON_CPU, *NEVER, *ALLOWED}
    assert named - known <= _NOT_IN_0_5_17 | _GONE_BY_0_5_23
    assert not (_NOT_IN_0_5_17 | _GONE_BY_0_5_23) - named
    for family in (*FAMILIES, ALLOWED_FAMILY):
        assert any(name.startswith(family) for name in known), family


def test_what_is_refused_has_no_other_name(actions: list[argparse.Action]) -> None:
    """SGLang's parser sets the same by several names, of one argument or of several."""
    names: dict[str, set[str]] = {}
    for action in actions:
        names.setdefault(action.dest, set()).update(action.option_strings)
    assert any(len(each) > 1 and all(map(_is_bounded, each)) for each in names.values())
    for dest, each in names.items():
        if any(map(_is_bounded, each)):
            free = {name for name in each if not _is_bounded(name)}
            # What switches something off may be passed.
            assert all(name.startswith(("--no-", "--disable-")) for name in free), (dest, free)


def test_no_other_argument_is_taken_for_a_refused_one(actions: list[argparse.Action]) -> None:
    """A whole name is no shortened one, though another may begin with it."""
    taken = {
        name
        for action in actions
        for name in action.option_strings
        if why_refused(name) is not None
    }
    assert taken == {
        name
        for action in actions
        for name in action.option_strings
        if name in REFUSED
        or (
            name.startswith(tuple(FAMILIES))
            and name not in ALLOWED
            and not name.startswith(ALLOWED_FAMILY)
        )
    }


@pytest.mark.parametrize(
    "args",
    [
        ["--attention-backend", "triton"], ["--attention-b=triton"], ["--enable-mixed-chunk"],
        ["--hicache-size", "3"], ["--enable-hierarchical-cache"], ["--speculative-algorithm", "x"],
        ["--spec", "x"], ["--speculative-algorithm=EAGLE"], ["--speculative-draft-model-path", "m"],
        ["--speculative-algo", "NGRAM"], ["--speculative-num-steps", "3"],
        ["--disaggregation-mode", "decode"], ["--kv-canary", "on"],
        ["--page-size", "16"], ["--page-size=16"], ["--tp", "2"], ["--kv-cache-dtype", "fp8_e5m2"],
        ["--config", "x.yaml"], ["--port", "1"], ["--model-path", "m"], ["--max-total-tokens", "9"],
        ["--cuda-graph-backend-prefill", "full"], ["--cuda-graph-config", "{}"],
        ["--cuda-graph-backend-decode", "breakable"], ["--debug-cuda-graph"],
        ["--ssl-certfile", "x.pem"], ["--ssl-key=x.pem"], ["--api-key", "k"], ["--admin-api=k"],
        ["--enable-http2"], ["--fastapi-root-path", "/x"], ["--tokenizer-worker-num", "2"],
        ["--enable-custom-logit-processor"],
        ["--enable-multimodal"], ["--quantization-param-path", "scales.json"],
        ["--enable-deterministic-inference"], ["--enable-mis"],
        ["--rl-on-policy-target", "fsdp"], ["--enable-determ"],
        ["--enable-kv-cache-sharding"], ["--enable-nvidia-mega"], ["--enable-layernorm-sp"],
        ["--startup-weight-load-mode", "overlap"], ["--dcp-size", "2"], ["--attn-cp-size=2"],
        ["--decode-context-parallel-size", "2"], ["--attention-context-parallel-size", "2"],
        ["--grammar-backend", "xgrammar"], ["--grammar-b=llguidance"],
    ],
)  # fmt: skip
def test_refuses_sglang_arguments_that_contradict_us(args: list[str]) -> None:
    with pytest.raises(SettingsError, match=f"SGLang argument {args[0].partition('=')[0]} "):
        check_sglang_args(["--log-level", "debug", *args], device="cpu")


def test_what_brings_kv_back_is_refused_with_a_reason_of_every_placement() -> None:
    for name in ("--hicache-size", "--enable-hierarchical-cache", "--enable-lmcache"):
        with pytest.raises(SettingsError, match="selected from a key index"):
            check_sglang_args([name, "3"], device="cuda")
    check_sglang_args(["--dcp-size", "1"], device="cuda")


def test_keys_on_the_command_line_name_the_file_instead() -> None:
    with pytest.raises(SettingsError, match="use --api-key-file of tandemkv"):
        check_sglang_args(["--api-key=secret"], device="cpu")


def test_passes_other_sglang_arguments() -> None:
    check_sglang_args(
        [
            "--log-level",
            "debug",
            "--page-size",
            "1",
            "--stream-interval=2",
            "--disable-radix-cache",
            "--grammar-backend=none",
        ],
        device="cpu",
    )
    check_sglang_args(["--grammar-backend", "xgrammar"], device="cuda")
    check_sglang_args(["--page-size", "16"], device="cuda")
    with pytest.raises(SettingsError, match=r"--page-size .* one token at least; any value but 0"):
        check_sglang_args(["--page-size", "0"], device="cuda")
    check_sglang_args(
        ["--cuda-graph-backend-prefill=disabled", "--cuda-graph-bs-decode", "8", "16"],
        device="cuda",
    )


@pytest.mark.parametrize(
    "args",
    [
        ["--grpc-port", "4000"], ["--sidecar=mine"], ["--kv-events-config", "{}"],
        ["--remote-instance-weight-loader-backend", "nccl"], ["--load-format", "remote_instance"],
        ["--moe-a2a-backend", "deepep"], ["--moe-a2a=mooncake"], ["--enable-two-batch-overlap"],
        ["--enable-torch-compile"], ["--delete-ckpt-after-loading"], ["--base-gpu-id", "1"],
        ["--tp-size", "1"], ["--tensor-parallel-size=1"], ["--nccl-init-addr", "h:1"],
        ["--dwdp-size", "2"], ["--enable-hicache"], ["--max-queued-requests", "9"],
        ["--weight-cache-mode", "client"], ["--offload-mode", "cpu"],
    ],
)  # fmt: skip
def test_refuses_other_doors_parts_of_batches_and_weights_that_change(args: list[str]) -> None:
    with pytest.raises(SettingsError, match=f"SGLang argument {args[0].partition('=')[0]} "):
        check_sglang_args(args, device="cuda")


def test_a_value_may_be_refused_alone() -> None:
    check_sglang_args(["--load-format", "dummy", "--moe-a2a-backend=none"], device="cuda")
    with pytest.raises(SettingsError, match="any value but remote_instance is possible"):
        check_sglang_args(["--load-format=remote_instance"], device="cuda")


@pytest.mark.parametrize(
    "name",
    [
        "SGLANG_GRPC_PORT", "SGLANG_RUST_SERVER", "DUMPER_SERVER_PORT", "DUMPER_ENABLE",
        "SGLANG_TEST_SCRIPTED_RUNTIME_ADDRESS", "SGLANG_USE_HND_KVCACHE",
    ],
)  # fmt: skip
def test_refuses_variables_that_open_other_doors_or_lay_out_keys_otherwise(name: str) -> None:
    check_sglang_environment({name: "0", "SGLANG_LOG_MS": "1", "PATH": "/bin"})
    check_sglang_environment({name: "False"})
    with pytest.raises(SettingsError, match=f"environment variable {name} is set: .*; unset it"):
        check_sglang_environment({"PATH": "/bin", name: "4000"})
