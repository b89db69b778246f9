"""The application with a shortcut: the calls that every job makes go past the framework's layers and its routing."""

from collections.abc import Awaitable, Callable, Mapping

from fastapi import FastAPI
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cosmos_rl_reward.front.local_only import LocalOnly

Endpoint = Callable[[Request], Awaitable[Response]]
Answer = Callable[[Request, Exception], Awaitable[Response]]


class DirectApp(FastAPI):
    """A FastAPI application; ``serve_directly`` names the calls that are not FastAPI's."""

    _direct: ASGIApp | None = None
    _endpoints: Mapping[str, Endpoint] = {}

    def serve_directly(
        self, endpoints: Mapping[str, Endpoint], errors: Mapping[type[Exception], Answer], local: bool
    ) -> None:
        """Answer POST requests.

        Args:
            endpoints: by path.
            errors: the answer to each kind of exception.
            local: refuse what does not come from this machine, as ``LocalOnly`` does.
        """
        expected = tuple(errors)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope, receive, send)
            try:
                response = await endpoints[scope["path"]](request)
            except expected as error:
                response = await next(errors[kind] for kind in type(error).__mro__ if kind in errors)(request, error)
            await response(scope, receive, send)

        self._endpoints = endpoints
        self._direct = ServerErrorMiddleware(LocalOnly(answer) if local else answer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the application's life."""
        direct = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._endpoints
        if self._direct is None or not direct:
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        await self._direct(scope, receive, send)
