"""Evaluation of long-context models: measures, one report, and a callback for training."""
