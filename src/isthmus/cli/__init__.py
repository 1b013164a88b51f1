"""The commands: each file parses its arguments, calls one function, and prints.

May import all packages.
"""
