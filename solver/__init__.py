"""Mixed-integer program, fixed recipes, simulator: from a profile to a plan. Never imports torch."""
