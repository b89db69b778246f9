"""A service without tokens answers to this machine's names only, so that no page in a browser can use it."""

from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cosmos_rl_reward.config import LOOPBACK

NAMES = (b"host", b"origin")


class LocalOnly:
    """Refuses other names in ``Host`` (a page's name that was made to point here) and pages of other servers."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] == "http" and (reason := _find_rejection(scope["headers"])):
            app = JSONResponse({"message": reason, "error": reason}, 403)
        await app(scope, receive, send)


def _find_rejection(headers: list[tuple[bytes, bytes]]) -> str:
    """Why a request is not one of this machine's own, or an empty string."""
    hosts, origins = ([value.decode("latin-1").lower() for key, value in headers if key == k] for k in NAMES)
    for host in hosts:
        if _host_name(host) not in LOOPBACK:
            return f"Host: {host[:100]!r} is not a name of this machine; other names need a token_file"
    for origin in origins:
        if origin.partition("://")[2] not in hosts:
            return "Origin: pages of other servers may not use a service without tokens; set token_file"
    return ""


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
