# SPDX-License-Identifier: Apache-2.0
"""Which speculative decoding of SGLang's can be served: drafts that are verified densely."""

from __future__ import annotations

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.server.settings.launch_settings import ServeSettings
from tandemkv.server.settings.sglang_args import value_of

ALGORITHM = "--speculative-algorithm"


def check_speculation(settings: ServeSettings, spec: ModelSpec) -> None:
    """Refuse speculative decoding, unless every layer attends to everything in one process.

    `check_sglang_args` has refused drafts of another model before. Raises `SettingsError`, with
    what to do.
    """
    if value_of(settings.sglang_args, ALGORITHM) is None:
        return
    policy = settings.selection.policy
    if not settings.selection.declared.all_exact:
        raise SettingsError(
            f"SGLang argument {ALGORITHM} cannot be passed with policy={policy}: drafts are "
            "verified by attention to everything; use --policy exact, or drop the argument"
        )
    if settings.cache_ranks != 0:
        raise SettingsError(
            f"SGLang argument {ALGORITHM} cannot be passed with "
            f"cache_ranks={settings.cache_ranks}: drafts of a lost pass cannot be taken back; use "
            "--cache-ranks 0"
        )
    if settings.evaluation:
        raise SettingsError(
            f"SGLang argument {ALGORITHM} cannot be passed with --evaluation, which chooses tokens "
            "one at a time; drop one of them"
        )
    if spec.other_layers:
        kind = "linear attention" if spec.linear_layers else "a sliding window"
        raise SettingsError(
            f"SGLang argument {ALGORITHM} cannot be passed with {spec.architecture}: drafts are "
            f"not verified in layers with {kind}; drop the argument"
        )
