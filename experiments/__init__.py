"""The paper's tables at a size that one GPU trains: rows.toml, a sweep that runs it, a notebook that draws
docs/results.md from results/. In the repository, not in the wheel."""
