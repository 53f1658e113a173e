"""What a training run will do, told from its config before it starts. Imports neither torch nor a framework."""
