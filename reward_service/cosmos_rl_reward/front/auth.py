"""Bearer tokens with scopes, read from a file or the environment, renewed without a restart."""

import hashlib
import hmac
import os
from pathlib import Path

from cosmos_rl_reward.config import LOOPBACK, ServiceConfig
from cosmos_rl_reward.errors import UserError
from cosmos_rl_reward.payload.errors import Refused
from cosmos_rl_reward.text_files import read_text

SCOPES = ("submit", "read", "admin")
ENVIRONMENT = "COSMOS_RL_REWARD_TOKENS"


def parse_tokens(text: str, source: str) -> dict[bytes, frozenset[str]]:
    """Digest of each token and what it may do. Lines are ``token`` or ``token scope,scope``; ``#`` begins a comment.

    Raises:
        UserError: an unknown scope or a token under 16 characters; names the line, never the token.
    """
    tokens: dict[bytes, frozenset[str]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        scopes = frozenset(SCOPES)
        if len(words) > 1:
            scopes = frozenset(words[1].split(","))
        if len(words) > 2 or not scopes <= set(SCOPES):
            raise UserError(f"{source}, line {number}: after the token come scopes out of {', '.join(SCOPES)}")
        if len(words[0]) < 16:
            raise UserError(f"{source}, line {number}: a token needs at least 16 characters")
        tokens[hashlib.sha256(words[0].encode()).digest()] = scopes
    return tokens


class Auth:
    """Checks requests against the tokens; without any token everything is allowed."""

    def __init__(self, config: ServiceConfig) -> None:
        self._file = Path(config.token_file) if config.token_file else None
        self._environment = parse_tokens(os.environ.get(ENVIRONMENT, "").replace(",", "\n"), ENVIRONMENT)
        self._stamp: tuple[int, int] | None = None
        self._tokens = self._environment
        self._read()
        if not self._tokens and config.host not in LOOPBACK:
            raise UserError(
                f"host = {config.host!r} can be reached from other machines, but there is no token: set token_file"
                f" (or the environment variable {ENVIRONMENT}), or host = 'localhost'"
            )

    @property
    def open(self) -> bool:
        """Whether there is no token at all, so that every local client may do everything."""
        return not self._tokens

    def _read(self) -> None:
        if self._file is None:
            return
        try:
            status = self._file.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if stamp != self._stamp:
                tokens = parse_tokens(read_text(self._file), str(self._file))
                if not tokens:
                    raise UserError(f"token_file {self._file}: holds no token")
                self._tokens, self._stamp = {**self._environment, **tokens}, stamp
        except OSError as error:
            if self._stamp is None:
                raise UserError(f"token_file {self._file}: {error.strerror}") from error
        except UserError:
            if self._stamp is None:
                raise  # at start; later the tokens that were good stay

    def check(self, header: str, scope: str) -> str:
        """Check that the ``Authorization`` header has a token with ``scope``; returns a name for it.

        Raises:
            Refused: no token or a wrong one (401), or one without the scope (403).
        """
        self._read()
        if not self._tokens:
            return ""
        kind, _, token = header.partition(" ")
        given = hashlib.sha256(token.strip().encode()).digest()
        found: frozenset[str] | None = None
        for digest, scopes in self._tokens.items():  # all of them, so that timing reveals nothing
            if hmac.compare_digest(digest, given):
                found = scopes
        if kind.lower() != "bearer" or found is None:
            raise Refused("a valid bearer token is needed", 401)
        if scope not in found and "admin" not in found:
            raise Refused(f"this token may not {scope}", 403)
        return given.hex()[:16]
