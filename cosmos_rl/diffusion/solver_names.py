"""Names of solvers that need no torch to be known."""

CHURNED = ("1euler", "2ab")
"""Solvers of EDM's sampler."""
SAMPLING_ONLY = {"2mid": 2, "2mid_stable": 2, "2heun_edm": 2, "2heun_naive": 2, "3kutta_naive": 3}
"""Runge-Kutta solvers, and how often they call the model in a step. They are for sampling alone."""


def explain_sampling_only(solver: str) -> str:
    """Why a solver of `SAMPLING_ONLY` cannot be trained."""
    return (
        f'"{solver}" calls the model {SAMPLING_ONLY[solver]} times in a step, so the mean of the step is not affine in '
        'one velocity, as training needs; of its kind "2ab" (second order, one call) and "1euler" are trained'
    )
