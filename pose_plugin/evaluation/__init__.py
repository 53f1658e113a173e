"""Measures of what a context window is worth: passkey retrieval, sliding-window perplexity, one report."""
