"""Names of solvers that need no torch to be known."""

_SEVERAL_CALLS = {"2mid": 2, "2mid_stable": 2, "2heun_edm": 2, "2heun_naive": 2, "3kutta_naive": 3}
"""Runge-Kutta solvers, and how often they call the model in a step."""


def refuse_sampling_only(solver: str) -> None:
    """
    Raises:
        ValueError: the solver can only sample: its steps have no transition that can be trained.
    """
    calls = _SEVERAL_CALLS.get(solver)
    if calls is not None:
        raise ValueError(
            f'solver: found "{solver}", which calls the model {calls} times in a step, so that the mean of the step is '
            'not affine in one velocity and has no known log-probability; allowed for training: "2ab" (second order '
            'with one call) or "1euler"'
        )
