"""Errors as clients of the API read them."""

from collections.abc import Mapping
from typing import Any

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 499: "client_closed_request"}


class ApiError(Exception):
    """A request that is refused or that failed, with what the client is told of it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        """An answer with an error.

        Args:
          status: of HTTP.
          message: a sentence that names the cause and the fix.
          param: field of the request that does not fit.
          code: the API's name of the error.
        """
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refusal(param: str, message: str, code: str | None = None) -> ApiError:
    """A request whose field does not fit."""
    return ApiError(400, message, param=param, code=code)
