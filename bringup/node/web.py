"""Opens a file's address over http(s), and says what a server's refusal means: hopeless, or worth another try.

Apart from `download.py`, so that only who fetches from the web loads TLS.
"""

from __future__ import annotations

import email.utils
import http.client
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .download import HOPELESS, DownloadFailed, Limits, Retry, Wanted, brief, partial_of


class _Redirects(urllib.request.HTTPRedirectHandler):
    """A token goes to the host that it is for, and not on to the one that the answer points to."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        old_host = urllib.parse.urlsplit(req.full_url).netloc
        if new is not None and urllib.parse.urlsplit(newurl).netloc != old_host:
            new.remove_header("Authorization")
        return new


@contextmanager
def answer(wanted: Wanted, headers: Mapping[str, str], limits: Limits) -> Iterator[http.client.HTTPResponse]:
    """A server's answer, while it is read. Raises Retry or DownloadFailed, also for what goes wrong meanwhile."""
    if not wanted.address.startswith(("http://", "https://")):
        raise DownloadFailed(f"{wanted.address} is no address: it begins with http:// or https://", "address")
    request = urllib.request.Request(wanted.address, headers=dict(headers))
    try:
        with urllib.request.build_opener(_Redirects).open(request, timeout=limits.stall_s) as opened:
            yield opened
    except urllib.error.HTTPError as error:
        error.close()
        raise _status(error, wanted, limits) from None
    except TimeoutError:
        raise Retry(f"no byte for {limits.stall_s:g} s") from None
    except (ValueError, http.client.InvalidURL):
        # What Python says of it may hold the token.
        what = "has a character, or its token has one, that must not be in it"
        raise DownloadFailed(f"{brief(wanted.address)} {what}", "address") from None
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or error
        raise Retry(f"connection failed: {reason or type(error).__name__}") from None


def _status(error: urllib.error.HTTPError, wanted: Wanted, limits: Limits) -> Exception:
    """What an HTTP status means: hopeless, or worth another try (after the time that the server asks for)."""
    where = brief(wanted.address)
    if error.code in HOPELESS:
        return DownloadFailed(f"{where} {HOPELESS[error.code]}", "status")
    if error.code == 416:
        partial_of(wanted.target).unlink(missing_ok=True)
        return Retry("the server has fewer bytes than we have already (416)", 0, "wrong_bytes")
    if error.code in (408, 425, 429) or error.code >= 500:
        wait = parse_retry_after(error.headers.get("Retry-After"), time.time())
        if wait is not None and wait > limits.retry_after_longest_s:
            return DownloadFailed(f"{where} asks to wait {wait:.0f} s ({error.code})", "status")
        return Retry(f"the server answered {error.code}", wait, "status")
    return DownloadFailed(f"{where}: the server answered {error.code}", "status")


def parse_retry_after(value: str | None, now: float) -> float | None:
    """Seconds in a Retry-After header (a number or a date), None without one or with nonsense in it."""
    if not value:
        return None
    if value.strip().isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - now)
    except (TypeError, ValueError):
        return None
