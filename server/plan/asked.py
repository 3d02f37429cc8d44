# SPDX-License-Identifier: Apache-2.0
"""What is asked of `plan` with the options of `serve`, and whether that would take them."""

from __future__ import annotations

from contextlib import suppress

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.server.settings.launch_settings import ServeSettings

OWN_OPTIONS = {
    "cache.capacity_tokens": "--cache-tokens",
    "max_running_requests": "--concurrency",
    "max_context": "--context",
    "chunked_prefill_size": "--chunked-prefill-size",
    "dtype": "--dtype",
    "model": "--model",
}
"""Settings that `plan` has options of its own for, and reads nowhere else."""


def asked_placement(
    settings: ServeSettings, spec: ModelSpec, num_gpus: int
) -> tuple[int | None, int | None]:
    """Return the GPUs of the model and of the cache; None for a number that is left open.

    Both mean what they mean to `serve`: with `cache_ranks` alone the model is on one GPU, and a
    link that is given leads to as many cache ranks as it does there. Raises
    `SettingsError` or `PolicyError`, with what to do, if `serve` would refuse `settings`, or there
    are fewer than these GPUs.
    """
    from tandemkv.cache_rank.calibration.format import CalibrationError
    from tandemkv.cache_rank.policies.registry import check_pooling, check_read, find_policy
    from tandemkv.server.checks.preflight import check_channels, check_heads, check_model

    from .placement_checks import check_contradictions

    if settings.nnodes > 1:
        count = settings.cache_ranks or 0
        raise SettingsError(
            f"nnodes={settings.nnodes}: plan knows no network between hosts; leave it out. With "
            f"--gpus {settings.tensor_parallel + count} --tp {settings.tensor_parallel} "
            f"--cache-ranks {count} the memory of each GPU is the same, and the times are those of "
            "one host"
        )
    check_model(settings, spec, {})
    policy = find_policy(settings.selection.policy)
    policy.check_settings(settings.selection)
    check_read(policy, settings.selection)
    check_pooling(policy, settings.selection)
    check_channels(settings.selection, spec)
    with suppress(CalibrationError):  # that there is none is told with the plan
        check_heads(settings, spec)
    tp_size, cache_ranks = settings.tensor_parallel, settings.cache_ranks
    if settings.wished_link is not None:
        cache_ranks = settings.placement_on("cuda").num_cache_ranks
    if cache_ranks is None and "tensor_parallel" not in settings.model_fields_set:
        return None, None
    if spec.num_kv_heads % tp_size:
        raise SettingsError(
            f"tensor_parallel={tp_size}: several GPUs would have the same one of "
            f"{spec.num_kv_heads} KV heads, for which plan has no figures; use --tp "
            f"{spec.num_kv_heads} at most"
        )
    if cache_ranks is not None:
        check_contradictions(settings, spec, settings.placement_on("cuda"))
    # Cache ranks at an address have GPUs of their own hosts.
    num_needed = tp_size if settings.cache_rank_addresses else tp_size + (cache_ranks or 0)
    if num_needed > num_gpus:
        counts = {"--tp": tp_size if tp_size > 1 else 0, "--cache-ranks": cache_ranks or 0}
        lower = " or ".join(name for name, count in counts.items() if count)
        raise SettingsError(
            f"tensor_parallel={tp_size} and cache_ranks={cache_ranks or 0} take {num_needed} GPUs, "
            f"and gpus={num_gpus}; use --gpus {num_needed}, or a lower {lower}"
        )
    return tp_size, cache_ranks
