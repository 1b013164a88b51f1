"""What a run will take, from a recipe alone: seconds, bytes, memory, money. Standard library only.

May import config and layout.
"""
