"""A script in nanochat's style: settings, then one flat loop. python examples/nano_style.py FOLDER"""

import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import isthmus

# Settings
inner_steps, rounds = 10, 4
grad_accum_steps, device_batch, context, width = 2, 4, 32, 64
matrix_lr, embedding_lr, warmdown = 0.02, 0.2, 0.5
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "nano-style")

# Model: a recurrent one, which no recipe describes
torch.manual_seed(0)
model = torch.nn.ModuleDict(
    {
        "embed": torch.nn.Embedding(256, width),
        "mixer": torch.nn.GRU(width, width, batch_first=True),
        "head": torch.nn.Linear(width, 256),
    }
)
adam = torch.optim.AdamW(model["embed"].parameters(), lr=embedding_lr)
matrices = [*model["mixer"].parameters(), *model["head"].parameters()]
sgd = torch.optim.SGD(matrices, lr=matrix_lr, momentum=0.95)
optimizers = [adam, sgd]
for group in (group for optimizer in optimizers for group in optimizer.param_groups):
    group["initial_lr"] = group["lr"]

# Data and the run; a real fleet creates the run once, and gives each machine its key
text = torch.tensor(list(Path(__file__).read_bytes()))
if not (key := folder / "keys" / "solo.isthmus.toml").exists():
    settings = {"inner_steps": inner_steps, "rounds": rounds, "replicas": ["solo"], "keys": folder / "keys"}
    isthmus.OuterSync.create(model, folder / "bucket", **settings)
sync = isthmus.OuterSync(model, key=key)

# Training: two optimizers, gradient accumulation, clipping, a schedule that follows global_step
total, started = inner_steps * rounds, time.time()
while not sync.done:
    for _ in range(grad_accum_steps):
        starts = torch.randint(len(text) - context, (device_batch,))
        batch = torch.stack([text[i : i + context + 1] for i in starts])
        hidden, _ = model["mixer"](model["embed"](batch[:, :-1]))
        loss = F.cross_entropy(model["head"](hidden).flatten(0, 1), batch[:, 1:].flatten())
        (loss / grad_accum_steps).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scale = min(1.0, (1 - sync.global_step / total) / warmdown)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * scale
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if sync.step(loss, tokens=grad_accum_steps * batch.numel()):
        print(f"round {sync.round}: loss {loss:.3f}, {time.time() - started:.1f} s")
