"""Arithmetic on a recipe: layers to stages, chunks, schedules, bytes on every link. Standard library only.

May import config.
"""
