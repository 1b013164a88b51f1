"""The paper's tables as lists of recipes: run what is missing, write a line per run, draw the page."""
