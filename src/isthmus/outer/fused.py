"""The codec with Triton kernels: each number is read and written once, for all replicas together.

Every operation uses the plain form for what does not fit the kernels: odd chunks, other dtypes, clipping,
weights. Decoded values and sums have the bits of the plain form.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isthmus.layout.chunks import CRC_BYTES, Layout
from isthmus.outer.aggregate import RunningMean, clipped, differ
from isthmus.outer.codec import Payloads, PlainCodec
from isthmus.sparse import bits as plain_bits
from isthmus.sparse import crc, launch
from isthmus.sparse.bits import Levels
from isthmus.sparse.bundle import Bundle, Group, arrange
from isthmus.sparse.quantize import levels as two_levels
from isthmus.sparse.topk import refuse_not_finite
from isthmus.sparse.wire import pack_all, stated_crc, unpack_views, viewed


class FusedCodec(PlainCodec):
    """`PlainCodec` on a GPU."""

    @torch.no_grad()
    def warm(self) -> None:
        """Compile the kernels on a small model: with cold caches that takes seconds, so a thread does it
        while the first round trains."""
        shapes = {"matrix": (4 * self.side, 4 * self.side), "gain": (4 * self.side,)}
        anchor, params, feedback = (
            {name: torch.full(shape, value, device=self.device) for name, shape in shapes.items()}
            for value in (1.0, 0.5, 0.0)
        )
        for _ in range(2):  # the second time with the feedback of the first
            data = self.pack_all(self.contribute_all(anchor, [params], [feedback], 0.95))
            self.step(anchor, self.unpack_all(data), 1e-3)

    @torch.no_grad()
    def contribute_all(
        self,
        anchor: Mapping[str, Tensor],
        params: Sequence[Mapping[str, Tensor]],
        feedback: Sequence[Mapping[str, Tensor]],
        decay: float,
        scale: float = 1.0,
        subtract: bool = True,
    ) -> list[Bundle]:
        """Encode all replicas at once. After a refusal (ValueError), the feedback is already overwritten."""
        shapes = {name: tuple(tensor.shape) for name, tensor in anchor.items() if name in params[0]}
        layouts, groups, _ = arrange(tuple(shapes.items()), self.side, self.keep)
        rows, odd = len(params), []
        done: dict[int, Group] = {}  # by group number, for all replicas together
        for i, names in enumerate(groups):
            tensors = (
                [anchor[name] for _ in params for name in names],
                [own[name] for own in params for name in names],
                [e[name] for e in feedback for name in names],
            )
            group_layouts = [layouts[name] for name in names] * rows
            if (
                self.values != "fp64"
                and all(map(launch.fits, group_layouts))
                and launch.contiguous_fp32([tensor for some in tensors for tensor in some])
            ):
                done[i], flag = launch.feed_back(*tensors, group_layouts, decay, scale, self.values, subtract)
                odd.append(flag)
        rest = {name: anchor[name] for i, names in enumerate(groups) if i not in done for name in names}
        plain = super().contribute_all(rest, params, feedback, decay, scale, subtract) if rest else []
        bundles = []
        for r in range(rows):
            others = iter(plain[r].groups if plain else ())
            own = [done[i].row(r, rows) if i in done else next(others) for i in range(len(groups))]
            bundles.append(Bundle(shapes, self.side, self.keep, self.values, own))
        if odd and torch.cat(odd).any():
            for e in feedback:
                refuse_not_finite(e)
        return bundles

    def pack_all(self, replicas: Sequence[Payloads]) -> list[bytes]:
        return pack_all(replicas, _write_bits, _seal)

    def unpack_all(self, strings: Sequence[bytes]) -> list[Bundle]:
        return unpack_views([viewed(data) for data in strings], self.device, _read_bits, _check_sums)

    def running_mean(self, how: str = "contributors", weights: Sequence[int] | None = None) -> RunningMean:
        return RunningMean(how, weights) if differ(weights) else FusedMean(how)

    @torch.no_grad()
    def step(
        self,
        anchor: Mapping[str, Tensor],
        replicas: Sequence[Payloads],
        step_size: float,
        how: str = "contributors",
        clip: str | None = None,
        weights: Sequence[int] | None = None,
    ) -> None:
        """Apply a few replicas' payloads to the anchor directly, without an accumulator."""
        bundles = [Bundle.of(payloads) for payloads in replicas if payloads]
        if 0 < len(bundles) == len(replicas) <= launch.MAX_REPLICAS and not differ(weights):
            layouts, groups, _ = arrange(*bundles[0].key)
            values = [group.values for bundle in bundles for group in bundle.groups]
            if (
                all(bundle.key == bundles[0].key for bundle in bundles)
                and all(launch.fits(layout) and layout.kept <= launch.FEW for layout in layouts.values())
                and launch.contiguous_fp32([*(anchor[name] for name in bundles[0]), *values])
            ):
                bundles = bundles if clip is None else list(clipped(bundles, clip))
                for i, names in enumerate(groups):
                    tensors, own = [anchor[name] for name in names], [layouts[name] for name in names]
                    sent = [bundle.groups[i] for bundle in bundles]
                    launch.step(tensors, sent, own, step_size, how == "contributors")
                return
        super().step(anchor, replicas, step_size, how, clip, weights)


class FusedMean(RunningMean):
    """`RunningMean` on a GPU."""

    def _add_group(
        self, index: Tensor, values: Tensor, layout: Layout, origin: Tensor, skip: Tensor, weight: int
    ) -> None:
        if launch.fits(layout) and values.dtype == torch.float32:
            launch.add(self.total, self.count, origin, skip, layout.width, index, values)
        else:
            super()._add_group(index, values, layout, origin, skip, weight)

    @torch.no_grad()
    def step(self, anchor: Mapping[str, Tensor], step_size: float) -> None:
        tensors = [anchor[name] for name in self.shapes]
        if self.num_added and launch.contiguous_fp32([self.total, *tensors]):
            launch.apply(tensors, self.total, self.count, self.num_added, step_size)
        else:
            super().step(anchor, step_size)


def _write_bits(bits: Tensor, group: Group, levels: Levels | None, layout: Layout) -> None:
    if not launch.fits(layout):
        return plain_bits.write_bits(bits, group, levels, layout)
    low = None if levels is None else two_levels(*levels)[0][:, 0]
    launch.write_bits(bits, group.index, group.values, low, layout)


def _read_bits(
    data: Tensor, values: Tensor | None, levels: Levels | None, layouts: Sequence[Layout], rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    if not all(map(launch.fits, layouts)) or (values is not None and values.dtype != torch.float32):
        return plain_bits.read_bits(data, values, levels, layouts, rows)
    pair = None
    if levels is not None:
        low, high = two_levels(*levels)
        pair = low[:, 0], high[:, 0]
    index, values, odd = launch.read_bits(data, values, pair, layouts[0])
    return index, values, (odd == 0).expand(rows)


def _seal(header: bytes, body: Tensor) -> list[bytes]:
    """`wire.seal` with checksums from the device, copied together with the body."""
    rows, size = body.shape
    data = torch.empty(rows, size + CRC_BYTES, dtype=torch.uint8, pin_memory=body.is_cuda)
    data.copy_(torch.cat([body, launch.crc_shares(body)[:, None].view(torch.uint8)], 1))
    sealed = []
    for row in data:
        view = row.numpy().data
        total = crc.crc_of(header, int.from_bytes(view[-CRC_BYTES:], "little"), size)
        sealed.append(b"".join([header, view[:-CRC_BYTES], total.to_bytes(CRC_BYTES, "little")]))
    return sealed


def _check_sums(views: Sequence[memoryview], at: int, body: Tensor) -> Tensor:
    """(R,) whether each payload states the checksum of its header and body, on the device."""
    wanted = [crc.expected_share(view[:at], stated_crc(view), body.shape[1]) for view in views]
    return launch.crc_shares(body) == launch.signed(wanted, body.device)
