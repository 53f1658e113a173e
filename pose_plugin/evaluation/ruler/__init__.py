"""RULER's thirteen tasks (arXiv 2404.06654), as prompts of a length in tokens."""
