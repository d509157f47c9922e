"""Who goes first: the line, the rank of the running, and what tenants have been charged."""

from __future__ import annotations

from math import floor

from tests.engine.oracle.choice import Choice


class Order:
    """The order that a policy makes; smaller keys go first."""

    def __init__(self, policy: str, ageing_s: float) -> None:
        self.policy = policy
        self.ageing_s = ageing_s
        self.charged: dict[str, int] = {}  # tokens, by tenant
        self.last_served = 0  # what the tenant last taken from the line had been charged then

    def level(self, choice: Choice) -> int:
        return choice.priority + floor(choice.asked.arrived / self.ageing_s)

    def in_line(self, choice: Choice) -> tuple[int, ...]:
        never_ran = choice.runs == 0
        if self.policy == "fcfs":
            return never_ran, choice.arrival
        if self.policy == "priority":
            return self.level(choice), never_ran, choice.arrival
        return self.level(choice), self.charged[choice.tenant], never_ran, choice.arrival

    def rank(self, choice: Choice) -> tuple[int, ...]:
        if self.policy == "fcfs":
            return (choice.arrival,)
        return self.level(choice), choice.arrival

    def comes(self, tenant: str, is_live: bool) -> None:
        """A request of the tenant has been accepted."""
        charged = self.charged.setdefault(tenant, 0)
        if not is_live:
            self.charged[tenant] = max(charged, self.last_served)

    def taken(self, choice: Choice) -> None:
        """The choice has been tried, as the first of the line."""
        self.last_served = max(self.last_served, self.charged[choice.tenant])

    def nothing_is_live(self) -> None:
        self.last_served = max([self.last_served, *self.charged.values()])
