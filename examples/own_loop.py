"""A loop of your own around a small GPT, as two replicas on this machine: python examples/own_loop.py"""

import sys
import threading
from pathlib import Path

import torch
from torch import nn

import isthmus

TEXT = Path(__file__).read_bytes()  # what it learns
CONTEXT, WIDTH = 32, 64


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.tokens(text) + self.places.weight
        for layer in self.layers:
            x = layer(x, src_mask=self.mask)
        return self.head(x)


def train(name: str, key: Path) -> None:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(TEXT))
    draw = torch.Generator().manual_seed(ord(name))  # each replica reads its own batches
    with isthmus.OuterSync(model, key=key) as sync:  # the weights are now the run's
        while not sync.done:
            starts = torch.randint(len(text) - CONTEXT, (8,), generator=draw)
            batch = torch.stack([text[i : i + CONTEXT + 1] for i in starts])
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if sync.step(loss, tokens=batch.numel()):
                print(f"{name}: round {sync.round}, loss {loss:.3f}, weights {sync.digest[:12]}")


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "own-loop")
    settings = {"inner_steps": 10, "rounds": 6, "replicas": ["a", "b"], "keys": folder / "keys"}
    keys = isthmus.OuterSync.create(GPT(), folder / "bucket", **settings)
    threads = [threading.Thread(target=train, args=item) for item in keys.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
