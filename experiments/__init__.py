"""The paper's tables as lists of recipes: run what is missing, write a line per run, draw the page.

Not in the wheel. May import everything from isthmus; nothing in isthmus imports it except cli.
"""
