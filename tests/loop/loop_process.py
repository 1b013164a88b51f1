"""One replica as a process with a loop of its own: loop_process.py KEY SAVED ROUNDS_BEFORE_EXIT.

It saves all it needs after every step, as a user would, and goes on from there. With SAVED "-" it saves none.
"""

import os
import sys
import time
from pathlib import Path

import torch
from models import Odd, batch, train_step

import isthmus


def main(key: str, saved: str, pause: str) -> None:
    file = Path(saved)
    torch.set_num_threads(1)
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    found = torch.load(file, weights_only=True) if saved != "-" and file.exists() else {"sync": None}
    if found["sync"]:
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
    seed = ord(Path(key).name[0])
    with isthmus.OuterSync(model, key=key, state=found["sync"]) as sync:
        while not sync.done:
            tokens = batch(seed, sync.global_step)
            loss = train_step(model, optimizer, tokens)
            time.sleep(float(pause))
            if sync.step(loss, tokens=tokens.numel()):
                print(f"round {sync.round} loss {float(loss):.4f}", flush=True)
            if saved != "-":
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"sync": sync.state_dict()}, f"{saved}.new")
                os.replace(f"{saved}.new", saved)
        with torch.no_grad():
            model.eval()
            loss = sum(float(model.loss(batch(1, step))) for step in range(20)) / 20
        print(f"digest {sync.digest} loss {loss:.4f}", flush=True)


main(*sys.argv[1:])
