"""Show what a training run will do, from its config alone. Importing it imports neither torch nor a framework."""
