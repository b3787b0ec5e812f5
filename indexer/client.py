"""A small client of the HTTP API, with nothing but the standard library: what the command line uses."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from indexer.credentials import NO_CREDENTIALS, Credentials
from indexer.errors import IndexerError


class ServiceError(IndexerError):
    """The service answered with an error, or could not be reached (`status` 0)."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ServiceClient:
    """Calls one service. Proxies of the environment are not used. Raises ServiceError."""

    def __init__(self, url: str, timeout_s: float = 30.0, credentials: Credentials = NO_CREDENTIALS) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {"content-type": "application/json", **credentials.headers}
        self._opener = credentials.opener()

    def prefix_hits(self, query: dict[str, Any]) -> dict[str, Any]:
        return self.call("POST", "/v1/prefix-hits", query)

    def audit(self) -> dict[str, Any]:
        return self.call("GET", "/v1/audit")

    def call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        try:
            request = urllib.request.Request(
                self.url + path,
                data=None if body is None else json.dumps(body).encode(),
                method=method,
                headers=self._headers,
            )
            with self._opener.open(request, timeout=self._timeout_s) as response:
                answer: dict[str, Any] = json.loads(response.read())
                return answer
        except urllib.error.HTTPError as error:
            raise ServiceError(f"{self.url}{path} answered {error.code}: {_message(error)}", error.code) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ServiceError(f"{self.url} cannot be reached: {reason}") from error


def _message(error: urllib.error.HTTPError) -> str:
    text = error.read().decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]
