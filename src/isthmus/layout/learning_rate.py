"""The inner learning rate of every step, computed from the recipe alone. Standard library only."""

import math

from isthmus.config import InnerConfig


def learning_rate(step: int, config: InnerConfig, total_steps: int) -> float:
    """Linear warm-up from `warmup_start`, then cosine down to `final_lr`, as shares of the peak."""
    if step < config.warmup_steps:
        share = config.warmup_start + (1 - config.warmup_start) * step / config.warmup_steps
    else:
        length = max(1, (config.schedule_steps or total_steps) - config.warmup_steps)
        progress = min(1.0, (step - config.warmup_steps) / length)
        share = config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * share
