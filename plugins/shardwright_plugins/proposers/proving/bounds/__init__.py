"""Lower bounds: the Lagrangian relaxation of the choice of options, its multipliers, and the bound by bisection."""
