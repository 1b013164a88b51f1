"""The view on a terminal: six lines that redraw in place, drawn with rich."""

import sys
from typing import Any, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from isthmus.printing import guarded, unguarded, visible
from isthmus.runlog.live import LOSSES, Progress, View
from isthmus.runlog.words import clock, fleet_in_words, rate, rounds_in_words, size, times


class TerminalView(View):
    """Redraw four times a second in a thread, so that an inner step costs one assignment."""

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        super().__init__(progress, stream)
        self.console = Console(file=unguarded(stream), highlight=False)
        self.live = Live(
            console=self.console,
            get_renderable=self.draw,
            refresh_per_second=4,
            redirect_stdout=False,  # results on stdout may be piped
            vertical_overflow="crop",
        )

    def __enter__(self) -> Self:
        self.live.start()
        sys.stderr = guarded(sys.stderr)  # guard rich's replacement of stderr, until `stop`
        return self

    def __exit__(self, *exception: Any) -> None:
        self.live.stop()

    def note(self, text: str) -> None:
        self.console.print(Text(visible(text)))

    def draw(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2), expand=False)
        grid.add_column(style="dim", no_wrap=True, min_width=8)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        grid.add_row("held-out", self._losses())
        grid.add_row("train", self._training())
        for link, words in (("stages", "uncompressed"), ("replicas", "dense")):
            if self._has(link):
                grid.add_row(link, self._traffic(link, words))
        return Group(self._heading(), self._bar(), grid)

    def _has(self, link: str) -> bool:
        recipe = self.progress.recipe
        if link == "replicas":
            return recipe.num_replicas > 1
        return any(replica.kind == "pipelined" for replica in recipe.replicas)

    def _heading(self) -> Text:
        recipe = self.progress.recipe
        heading = Text(visible(recipe.name), style="bold", no_wrap=True, overflow="ellipsis")
        return heading.append(f"  {fleet_in_words(recipe).rstrip(',')}", style="not bold dim")

    def _bar(self) -> Table:
        progress = self.progress
        done = progress.rounds_done + progress.step / max(1, progress.num_steps)
        left = progress.eta_seconds()
        at = min(progress.rounds_done + 1, progress.total_rounds)  # the current round
        bar = Table.grid(padding=(0, 2), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_column(no_wrap=True, min_width=9)
        bar.add_row(
            Text.assemble(("round ", "dim"), f"{at}/{progress.total_rounds}"),
            ProgressBar(
                total=max(1, progress.total_rounds),
                completed=done,
                complete_style="cyan",
                finished_style="green",
            ),
            Text.assemble(
                ("inner ", "dim"), f"{progress.step:>{len(str(progress.num_steps))}}/{progress.num_steps}"
            ),
            Text.assemble(("ETA ", "dim"), clock(left) if left is not None else "..."),
        )
        return bar

    def _losses(self) -> Text:
        text = Text()
        for field in self.progress.losses:
            loss, change = self.progress.loss_and_change(field)
            if len(self.progress.losses) > 1:
                text.append(f"{LOSSES[field]} ", style="dim")
            text.append(f"{loss:.3f}" if loss is not None else "-", style="bold")
            if change is not None:
                text.append(f" {change:+.3f}", style="green" if change <= 0 else "red")
            text.append("   ")
        if awaited := sorted(self.progress.awaited):
            text.append(f"scoring {rounds_in_words(awaited)}", style="dim")
        return text

    def _training(self) -> Text:
        progress, text = self.progress, Text()
        loss = progress.train_loss()
        text.append(f"{loss:.3f}" if loss is not None else "-", style="bold")
        if progress.last and progress.last.tokens_per_second:
            text.append(f"   {rate(progress.last.tokens_per_second)}")
        if self.progress.sums["seconds"]:
            text.append(f"   {clock(self.progress.sums['seconds'])}").append(" here", style="dim")
        if self.progress.sums["fleet_seconds"] is not None:
            text.append(f"   {clock(self.progress.sums['fleet_seconds'])}").append(
                " by the virtual clock", style="dim"
            )
        return text

    def _traffic(self, link: str, words: str) -> Text:
        sent, dense = self.progress.sums["link_bytes"][link], self.progress.sums["dense_bytes"][link]
        text = Text(f"{size(sent)} sent".ljust(13) if sent else "-")
        if sent and dense:
            text.append(f"   {words} {size(dense)}".ljust(26), style="dim")
            text.append(times(dense / sent).removesuffix(" as much"), style="cyan")
        return text
