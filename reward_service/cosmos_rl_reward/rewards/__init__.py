"""The rewards that come with the service. A module is imported only in the worker of a reward it defines."""

# reward name -> module in this package; a module registers its classes with RewardRegistry
MODULES: dict[str, str] = {}
