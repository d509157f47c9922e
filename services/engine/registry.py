"""Who is known: every live request under its gateway's handle and under its token."""

from __future__ import annotations

from services.common.errors import InvalidArgument
from services.engine.events import Owner
from services.engine.request import Family, RequestSpec


class Registry:
    """Two maps that always hold the same requests."""

    def __init__(self) -> None:
        self._gateways: dict[int, dict[int, Family]] = {}
        self._tokens: dict[bytes, Family] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def check_free(self, spec: RequestSpec) -> None:
        """Refuses a name that a live request has."""
        if self.find(spec.owner) is not None:
            raise InvalidArgument(f"handle {spec.owner.handle} is in use", field="handle")
        if spec.token in self._tokens:
            raise InvalidArgument("the token is in use", field="token")

    def add(self, family: Family) -> None:
        """Knows a request from now on."""
        owner = family.spec.owner
        self._gateways.setdefault(owner.gateway, {})[owner.handle] = family
        self._tokens[family.spec.token] = family

    def remove(self, family: Family) -> None:
        """Forgets a request."""
        owner = family.spec.owner
        del self._tokens[family.spec.token]
        del self._gateways[owner.gateway][owner.handle]
        if not self._gateways[owner.gateway]:
            del self._gateways[owner.gateway]

    def find(self, owner: Owner) -> Family | None:
        """The request that a gateway calls so."""
        return self._gateways.get(owner.gateway, {}).get(owner.handle)

    def by_token(self, token: bytes) -> Family | None:
        """The request with this token."""
        return self._tokens.get(token)

    def of_gateway(self, gateway: int) -> list[Family]:
        """All requests of a gateway, in the order of their arrival."""
        return list(self._gateways.get(gateway, {}).values())
