"""Arithmetic on a recipe: layers to stages, chunks of a tensor, schedules, bytes per link.

May import config; standard library only.
"""
