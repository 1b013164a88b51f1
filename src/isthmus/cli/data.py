"""`isthmus data`: turn text into token shards, and inspect them."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.cli.arguments import add_json
from isthmus.errors import ConfigError, RunError
from isthmus.printing import visible

if TYPE_CHECKING:
    from isthmus.data.manifest import Manifest

PREPARE_EXAMPLES = """\
examples:
  isthmus data prepare books/ --to corpus/
      every text file under books/; 1 % of the documents is held out for validation, more of a small text
  isthmus data prepare train-*.jsonl.zst --validation-from validation.jsonl.zst --to corpus/ --vocab 32768
      JSON lines as DCLM ships them, with a validation file of their own
  isthmus data prepare c4-train.*.json.gz --to corpus/ --tokenizer tokenizer.json --limit-bytes 2_000_000_000
      the first 2 GB of C4, with the tokenizer of an existing model
  isthmus data prepare https://example.org/books.jsonl.gz --to corpus/
      downloaded first, into ~/.cache/isthmus (or ISTHMUS_CACHE)
  isthmus data prepare --hf allenai/c4:en --split train --limit-bytes 200_000_000 --to corpus/
      streamed from the Hugging Face hub (pip install 'isthmus[hf]')

inputs: .txt  .md  .jsonl  .parquet, and .txt/.jsonl/.json packed as .gz or .zst (.json.gz means JSON lines).
  A line or a row is one document, its text in the field --text-field. A .txt is one document; a long one is
  cut at blank lines about every 32,000 characters, or where it says <|endoftext|>.
  Of a folder, hidden files and other kinds are left out and counted, as is a README.md beside data.
  Every file is looked at first (its first MiB of text), and all bad ones are one list. With --skip-bad a bad
  line of JSON is left out, other files from their fault on, and files without anything good altogether.

A killed run is continued by the same command. Name the folder in a recipe:  [data] corpus = "corpus/"
"""
DEMO_VOCAB = 1024  # of the recipe that finishes in minutes on a CPU
EPILOG = """\
examples:
  isthmus data prepare my-texts/ --to corpus/ --vocab 1024      your own text, for the model of `demo`
  isthmus data show corpus/                                     what came of it
  isthmus simulate demo --set data.corpus=corpus/               a run on it
The vocabulary is at most the model's: 1,024 for nano, 8,192 for 10m and 20m, 32,000 for the others.
"""
SHOW_EXAMPLES = """\
examples:
  isthmus data show corpus/              sizes, vocabulary, sources
  isthmus data show s3://my-runs/corpus  the same of one in a bucket
  isthmus data show corpus/ --verify     also read every shard and compare its sha256
  isthmus data show builtin:sample       the small corpus that comes with Isthmus
"""
PUSH_EXAMPLES = """\
examples:
  isthmus data push corpus/ s3://my-runs/corpus
then, in the recipe:  [data] corpus = "s3://my-runs/corpus"

Whoever needs the text fetches it from there by itself: `simulate`, `train`, `join`, `export`. Copies stay in
~/.cache/isthmus (or ISTHMUS_CACHE). Every file is checked by its sha256 when it is fetched; `data show URL
--verify` reads the copy again. A run fixes the sha256 of the manifest. Credentials are those for a run's
bucket. A killed upload is continued by the same command; a corpus that is there is never replaced.
"""


def register(commands: argparse._SubParsersAction) -> None:
    group = commands.add_parser(
        "data",
        help="make and inspect training corpora",
        description="Turn your own text into what a run reads, and look at it.",
        epilog=EPILOG,
    )
    parts = group.add_subparsers(dest="data_command", required=True, metavar="COMMAND")

    parser = parts.add_parser(
        "prepare",
        help="turn text into token shards",
        description="Turn text into a corpus: a tokenizer, memory-mapped token shards and a manifest.",
        epilog=PREPARE_EXAMPLES,
    )
    parser.add_argument(
        "inputs", nargs="*", metavar="INPUT", help="a text file, a folder of them, or a web address"
    )
    parser.add_argument("--to", required=True, metavar="DIR", type=Path, help="folder of the new corpus")
    vocabulary = parser.add_mutually_exclusive_group()
    vocabulary.add_argument(
        "--vocab", type=int, metavar="N", help="train a byte-level BPE of N tokens (default 8192)"
    )
    vocabulary.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="use this tokenizer.json of Hugging Face, or that of a folder",
    )
    parser.add_argument(
        "--end-token", metavar="TOKEN", help="what ends a document (default: <|endoftext|>, </s> or the like)"
    )
    held_out = parser.add_mutually_exclusive_group()
    held_out.add_argument(
        "--validation",
        type=float,
        metavar="SHARE",
        help="share of the documents to hold out, chosen by a hash of their text "
        "(default 0.01, and up to 0.1 where that is less than a recipe scores)",
    )
    held_out.add_argument(
        "--validation-from", nargs="+", metavar="PATH", help="take the held-out documents from these files"
    )
    parser.add_argument(
        "--text-field", default="text", metavar="NAME", help="field of the text (default text)"
    )
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave out what cannot be read, and say at the end what it was",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the hash that holds documents out (default 0)"
    )
    parser.add_argument(
        "--shard-tokens", type=int, default=1 << 24, metavar="N", help="tokens per shard (default 16_777_216)"
    )
    parser.add_argument("--limit-bytes", type=int, metavar="N", help="stop after N bytes of text")
    parser.add_argument(
        "--hf", metavar="NAME[:CONFIG]", help="a dataset on the Hugging Face hub as the input"
    )
    parser.add_argument("--split", metavar="SPLIT", help="split of the --hf dataset (default train)")
    parser.add_argument("--overwrite", action="store_true", help="replace another corpus in DIR")
    add_json(parser)
    parser.set_defaults(run=prepare)

    parser = parts.add_parser(
        "show",
        help="print what a corpus holds",
        description="Print what a prepared corpus holds.",
        epilog=SHOW_EXAMPLES,
    )
    parser.add_argument("corpus", metavar="DIR", help="a prepared folder, a URL of one, or builtin:sample")
    parser.add_argument("--verify", action="store_true", help="compare every file with its sha256")
    add_json(parser)
    parser.set_defaults(run=show)

    parser = parts.add_parser(
        "push",
        help="put a corpus into a bucket, for others to fetch",
        description="Upload a prepared corpus, so that a recipe can name it by its URL.",
        epilog=PUSH_EXAMPLES,
    )
    parser.add_argument("corpus", metavar="DIR", help="a prepared folder")
    parser.add_argument("url", metavar="URL", help="where to: s3://bucket/prefix, or file:///folder")
    parser.set_defaults(run=push_corpus)


def prepare(args: argparse.Namespace) -> int:
    """Make a corpus, or continue one."""
    from isthmus.data.download import downloaded, is_web
    from isthmus.data.finding import LeftOut, find_files
    from isthmus.data.prepare import PrepareConfig, prepare
    from isthmus.data.progress import on_stderr
    from isthmus.data.streams import BadFiles

    if not args.inputs and not args.hf:
        raise ConfigError("no INPUT; give text files or folders before the options, or a dataset by --hf")
    if args.inputs and args.hf:
        raise ConfigError("give either text files and folders as INPUT or a dataset by --hf, not both")
    if args.split and not args.hf:
        raise ConfigError("--split names a part of a --hf dataset; for files, give those you want")
    config = PrepareConfig(
        vocab=8192 if args.vocab is None else args.vocab,
        tokenizer=args.tokenizer,
        end_token=args.end_token,
        validation=args.validation,
        text_field=args.text_field,
        limit_bytes=args.limit_bytes,
        seed=args.seed,
        shard_tokens=args.shard_tokens,
    )
    left_out, progress = LeftOut(), on_stderr()

    def here(given: list[str]) -> list[str | Path]:
        return [downloaded(each, progress) if is_web(each) else each for each in given]

    try:
        try:
            validation = find_files(here(args.validation_from or []), left_out=left_out)
            if args.hf:
                from isthmus.data.hub import HubDataset

                inputs = [HubDataset(args.hf, args.split or "train")]
            else:
                # A folder may contain its own validation files; they are not trained on.
                inputs = find_files(here(args.inputs), validation, left_out)
            manifest, is_new = prepare(
                inputs, validation, args.to, config, args.overwrite, progress, args.skip_bad
            )
        finally:
            progress.close()
    except BadFiles as bad:
        print(*bad.reasons, sep="\n", file=sys.stderr)
        raise
    except OSError as error:
        raise RunError(f"{error}; what is done is kept, and the same command continues") from error
    except KeyboardInterrupt:
        print("what is done is kept, and the same command continues", file=sys.stderr)
        raise
    if left_out.counts:
        print(f"left out: {left_out}", file=sys.stderr)
    if not is_new:
        print(f"{args.to} already holds this corpus; nothing to do", file=sys.stderr)
    print(manifest.to_json() if args.json else table(manifest), end="")
    if is_new and not args.json:
        print(f'\nuse it in a recipe:  [data] corpus = "{args.to}"')
        print(f"or try it at once:  {first_run(args.to, manifest.vocab_size)}")
    return 0


def first_run(corpus: Path, vocab_size: int) -> str:
    """The recipe that finishes in minutes on a CPU, for this text."""
    larger = f" --set model.vocab={vocab_size}" if vocab_size > DEMO_VOCAB else ""
    return f"isthmus simulate demo --set data.corpus={shlex.quote(str(corpus))}{larger}"


def show(args: argparse.Namespace) -> int:
    """Print a manifest, and check the files against it if asked."""
    from isthmus.data.corpus import open_corpus

    corpus = open_corpus(args.corpus)
    if args.verify:
        corpus.verify()
        print(f"every file of {corpus.name} matches its sha256", file=sys.stderr)
    print(corpus.manifest.to_json() if args.json else table(corpus.manifest), end="")
    return 0


def push_corpus(args: argparse.Namespace) -> int:
    """Upload a corpus, or continue an upload."""
    from isthmus.data.progress import on_stderr
    from isthmus.data.push import push

    progress = on_stderr()
    try:
        corpus, sent = push(args.corpus, args.url, progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "interrupted; what was uploaded stays, and the same command continues"
        ) from None
    finally:
        progress.close()
    done = f"{sent / 1e6:,.1f} MB sent" if sent else "it was there already"
    print(f"{args.corpus} is at {args.url} ({done}), sha256 {corpus.sha256}")
    print(f'use it in a recipe:  [data] corpus = "{args.url}"')
    return 0


def table(manifest: "Manifest") -> str:
    rows = [["", "tokens", "documents", "text bytes", "bytes/token", "shards"]]
    for name, split in (("train", manifest.train), ("validation", manifest.validation)):
        counts = [f"{count:,}" for count in (split.tokens, split.documents, split.bytes)]
        rows.append([name, *counts, f"{split.bytes_per_token:.3f}", str(len(split.shards))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])]) for cells in rows]
    shown = [visible(source["name"]) for source in manifest.sources]
    more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
    end = visible(manifest.end_token)
    tail = [
        f"vocabulary {manifest.vocab_size:,} ({manifest.dtype}), documents end in {end}"
        f" = {manifest.end_id}, tokenizer sha256 {manifest.tokenizer_sha256[:12]}",
        f"corpus sha256 {manifest.tokens_sha256}",
        f"from {', '.join(shown[:4])}{more}",
    ]
    return "\n".join([*lines, *tail]) + "\n"
