# SPDX-License-Identifier: Apache-2.0
"""Settings of the HTTP edge. They concern one server and are not part of the handshake.

The launcher hands them to SGLang's HTTP process as JSON in ``TANDEMKV_EDGE``. Keys are in files,
of which the settings hold the paths alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, ValidationError, field_validator

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.settings.frozen_model import FrozenModel

EDGE_VARIABLE = "TANDEMKV_EDGE"

_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?:[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]{1,5}))?"
)
_LEFT_OUT = {"http": "80", "https": "443"}
"""Ports that browsers do not name."""


class EdgeSettings(FrozenModel):
    """What a request may ask for, how many there may be, and who may send them."""

    api_key_file: Path | None = Field(
        default=None,
        description="File (mode 0600) with the key that requests must send. Default: no key is "
        "asked for.",
    )
    admin_key_file: Path | None = Field(
        default=None,
        description="File of mode 0600 that holds the key of SGLang's administration routes; "
        "default: they are not served.",
    )
    cors_origins: tuple[str, ...] = Field(
        default=(),
        description="Web origins whose pages may call the server, e.g. https://ui.example:8443, or "
        "none.",
    )
    max_queued_requests: int = Field(
        default=64,
        ge=0,
        le=1 << 16,
        description="Completions that may wait beside max_running_requests; more get HTTP 429.",
    )
    max_body_bytes: int | None = Field(
        default=None,
        ge=1024,
        le=1 << 30,
        description="Longest body of a request; default twice max_prompt_bytes and 1 MiB.",
    )
    max_prompt_bytes: int | None = Field(
        default=None,
        ge=16,
        le=1 << 30,
        description="Longest prompt before it is tokenised; default 16 bytes a token of context.",
    )
    max_json_depth: int = Field(
        default=32, ge=4, le=256, description="Deepest nesting of a request's JSON."
    )
    body_timeout_s: float = Field(
        default=30.0, gt=0, le=3600, description="Longest wait for the body of a request."
    )
    max_n: int = Field(
        default=16, ge=1, le=1024, description="Completions of one request: prompts times n."
    )
    max_logprobs: int = Field(
        default=20, ge=0, le=256, description="Alternatives per token that logprobs may list."
    )
    max_stops: int = Field(
        default=16, ge=1, le=256, description="Stop strings of one request, and stop tokens."
    )
    max_stop_bytes: int = Field(default=256, ge=1, le=1 << 16, description="Longest stop string.")
    max_grammar_bytes: int = Field(
        default=1 << 16,
        ge=16,
        le=1 << 24,
        description="Longest JSON schema, regular expression or grammar of a request.",
    )

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        """Refuse what no browser sends as an origin, for it would match nothing."""
        found = tuple(origin.strip() for origin in origins)
        for origin in found:
            if origin == "*":
                raise ValueError(
                    "* would let every page that a user opens call this server; name the origins"
                )
            match = _ORIGIN.fullmatch(origin)
            if match is None:
                raise ValueError(
                    f"{origin!r} is no origin; write scheme://host or scheme://host:port in lower "
                    "case, without a path, as a browser's address bar begins"
                )
            if match["port"] and match["port"] == _LEFT_OUT.get(match["scheme"]):
                raise ValueError(
                    f"{origin!r}: browsers leave that port out; write {origin.rpartition(':')[0]}"
                )
        return found


def edge_settings(environ: Mapping[str, str] = os.environ) -> EdgeSettings:
    """Return what the launcher handed over; the defaults if it handed over nothing.

    Raises `SettingsError` if the variable cannot be read.
    """
    text = environ.get(EDGE_VARIABLE)
    if text is None:
        return EdgeSettings()
    try:
        return EdgeSettings.model_validate_json(text)
    except ValidationError as error:
        raise SettingsError(
            f"{EDGE_VARIABLE} is not what `tandemkv serve` hands over: {error}"
        ) from error
