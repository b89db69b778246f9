"""Flow-matching maths: sigmas, transition kernels, the sampling loop. Pure tensors, no config and no models.

Convention: ``x_sigma = (1 - sigma) * x_0 + sigma * noise``, velocity ``v = dx/dsigma = noise - x_0``.
"""
