"""Building and wrapping a model, and the arithmetic of one step; shared by the ranks and by the planner's trace."""
