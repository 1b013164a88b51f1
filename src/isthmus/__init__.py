"""Isthmus: pre-train one language model on machines that share no fast network."""

__version__ = "0.1.0"
