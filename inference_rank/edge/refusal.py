# SPDX-License-Identifier: Apache-2.0
"""The one way in which the edge refuses: an error body like OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
}


class RequestRefusedError(Exception):
    """A request that does not reach SGLang.

    `message` says ``name=value``, what is required, and what to do; `param` is the field at fault,
    and `code` a word for programs, e.g. ``model_not_found``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def response(self) -> Response:
        """Return the answer."""
        body = error_body(self.status, self.message, self.param, self.code)
        return Response(body, self.status, headers=self.headers, media_type="application/json")


def error_body(
    status: int, message: str, param: str | None = None, code: str | int | None = None
) -> bytes:
    """Return the JSON of an error."""
    kind = _TYPES.get(status, "invalid_request_error")
    error = {"message": message, "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"object": "error", "error": error})


def shown(value: object) -> str:
    """Return `value` as text for a message, short whatever it is."""
    if isinstance(value, str):
        text = repr(value[:40])
        return f"{text}..." if len(value) > 40 else text
    if isinstance(value, (list, dict)):
        return f"a {'list' if isinstance(value, list) else 'mapping'} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
