# SPDX-License-Identifier: Apache-2.0
"""What SGLang is told of the recurrent states of a model with linear attention."""

from __future__ import annotations

from collections.abc import Sequence

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.models.architectures import find_architecture
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.server.settings.launch_settings import ServeSettings
from tandemkv.server.settings.sglang_args import value_of

from .footprint import num_states
from .pages import PAGE_TOKENS

_STRATEGIES = ("--mamba-radix-cache-strategy", "--mamba-scheduler-strategy")
"""SGLang's flag, and its earlier name."""


def with_states(settings: ServeSettings, spec: ModelSpec, device: str) -> ServeSettings:
    """Say how many recurrent states SGLang keeps, if the model has some.

    Left alone it gives them nearly half of the memory that is free, where the key index is to be.
    Without a radix cache it keeps one for each request. On a GPU it has more for the radix tree,
    which go with its schedule and with pages; some architectures it must be told to do so for.
    Raises `SettingsError` if what is given does not go with that.
    """
    given, flag = settings.sglang_args, "--max-mamba-cache-size"
    if not spec.linear_layers or "--disable-radix-cache" in given:
        return settings
    more: tuple[str, ...] = ()
    if not value_of(given, flag):
        count = num_states(settings.max_running_requests, device) - 1  # SGLang adds the padding
        more = (flag, str(count))
    if device != "cpu":
        names_strategy = find_architecture(spec.architecture).names_strategy
        more = (*more, *_strategy(given, spec.architecture, names_it=names_strategy))
        more = (*more, *_pages(given))
    return settings.model_copy(update={"sglang_args": (*given, *more)}) if more else settings


def _pages(given: Sequence[str]) -> tuple[str, ...]:
    """Return the flag for pages as long as a chunk of SGLang's Triton kernels.

    These hand out a state after each chunk. With longer pages SGLang keeps that of another token:
    it looks for it as if chunks were as long (``_init_track_ssm_indices``).
    """
    flag = "--page-size"
    named = value_of(given, flag)
    if named and named.isdecimal() and int(named) > PAGE_TOKENS:
        raise SettingsError(
            f"SGLang argument {flag} {named}: states of linear attention are kept for pages of up "
            f"to {PAGE_TOKENS} tokens; leave it out, or pass --disable-radix-cache as well"
        )
    return () if named else (flag, str(PAGE_TOKENS))


def _strategy(given: Sequence[str], architecture: str, *, names_it: bool) -> tuple[str, ...]:
    """Return the flag for extra states, if SGLang must be told to keep some (`names_it`).

    What goes together SGLang checks for the architectures of its list alone. Raises `SettingsError`
    if what is given does not.
    """
    flag, triton = _STRATEGIES[0], "triton"
    named = next(filter(None, (value_of(given, name) for name in _STRATEGIES)), None)
    if named == "no_buffer" or (named == "auto" and names_it):
        raise SettingsError(
            f"SGLang argument {flag} {named}: without extra states of {architecture} SGLang wants "
            f"pages of one token, and the key index has some of {PAGE_TOKENS}; leave it out, or "
            "pass --disable-radix-cache as well"
        )
    if not names_it:
        return ()
    backend = value_of(given, "--linear-attn-backend") or triton
    if backend != triton:
        raise SettingsError(
            f"SGLang argument --linear-attn-backend {backend}: extra states of {architecture} are "
            f"kept by {triton} alone; leave it out, or pass --disable-radix-cache as well"
        )
    return () if named else (flag, "extra_buffer")
