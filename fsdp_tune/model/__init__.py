"""Build and wrap a model, and compute one step. Used by the ranks and by the planner's trace."""
