"""Forecasts: seconds, bytes, memory and money of a run before it starts, and recipes for a list of machines.

May import config and layout; standard library only, so `isthmus plan` needs no torch.
"""
