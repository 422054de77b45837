"""Which models are in memory: a pure planner, the view it decides over, and what carries it out."""
