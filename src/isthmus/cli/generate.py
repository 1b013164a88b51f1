"""`isthmus generate`: continue a text with a trained model."""

import argparse
import io
import json
import sys
import time

from isthmus.cli.arguments import add_corpus, add_device, add_json, check_model_arguments
from isthmus.errors import ConfigError
from isthmus.printing import unguarded, visible_lines

EPILOG = """examples:
  isthmus generate runs/demo "Once upon a time"
  isthmus generate demo-hf "Once upon a time" --temperature 0          the likeliest text; no draw
  isthmus generate s3://my-runs/first "It was" --temperature 0.8 --top-p 0.95 --seed 3
The text appears on stdout token by token, the prompt first. The same seed gives the same text on one machine.
"""


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue a text with a trained model",
        description="Continue a prompt, token by token, until the end of the text, --max-tokens, or a full "
        "context.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "source", metavar="RUN", help="a run directory, a bucket's URL or folder, or an exported folder"
    )
    parser.add_argument("prompt", help="the text to continue")
    parser.add_argument("--max-tokens", type=int, default=100, metavar="N", help="at most (default: 100)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0: the likeliest token (default: 0.8)"
    )
    parser.add_argument(
        "--top-p", type=float, default=0.95, metavar="P", help="draw from this share of the mass (0.95)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument(
        "--as",
        dest="as_",
        default="auto",
        choices=("auto", "plain", "pipelined"),
        help="auto (default): plain, but through the boundaries if every replica trained so",
    )
    add_corpus(parser)
    add_device(parser)
    add_json(parser)
    parser.set_defaults(run=generate)


def check(args: argparse.Namespace) -> None:
    if args.max_tokens < 1:
        raise ConfigError(f"--max-tokens is {args.max_tokens}; it must be at least 1")
    if not 0 <= args.temperature < float("inf"):
        raise ConfigError(f"--temperature is {args.temperature}; it must be 0 or a finite number above")
    if not 0 < args.top_p <= 1:
        raise ConfigError(f"--top-p is {args.top_p}; it is above 0 and at most 1")
    if not 0 <= args.seed < 2**63:
        raise ConfigError(f"--seed is {args.seed}; it must be 0 or more and below 2**63")
    if any("\ud800" <= c <= "\udfff" for c in args.prompt):  # how Python represents bytes that are not UTF-8
        raise ConfigError("the prompt is not UTF-8 text; convert it, for example with iconv -t UTF-8")


def harmless(text: str) -> str:
    """Escape what could control the terminal in the model's text. Tabs and newlines stay."""
    return "\t".join(map(visible_lines, text.split("\t")))


def generate(args: argparse.Namespace) -> int:
    check(args)
    check_model_arguments(args)
    from isthmus.export.text_generator import Text, open_generator
    from isthmus.replica.picks import pick_device

    generator = open_generator(args.source, args.as_, args.corpus, str(pick_device(args.device)))
    prompt = generator.encode(args.prompt)
    if len(prompt) >= generator.model.context:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens, the model's context {generator.model.context}; shorten it"
        )
    print(f"isthmus: {generator.about}", file=sys.stderr)
    live = not args.json
    out = unguarded(sys.stdout)  # a file gets the text unchanged
    shown = harmless if out.isatty() else str
    if live:
        if isinstance(out, io.TextIOWrapper):
            out.reconfigure(errors="replace")  # a character that the terminal lacks becomes "?"
        print(shown(args.prompt), end="", file=out, flush=True)
    text, parts, count, started = Text(generator.tokenizer, prompt), [], 0, time.monotonic()
    for token in generator.tokens(
        prompt, args.max_tokens, temperature=args.temperature, top_p=args.top_p, seed=args.seed
    ):
        count += 1
        parts.append(text.add(token))
        if live and parts[-1]:
            print(shown(parts[-1]), end="", file=out, flush=True)
    parts.append(text.rest())
    seconds = time.monotonic() - started
    ended = "end of text"
    if len(prompt) + count == generator.model.context:
        ended = "context full"
    elif count == args.max_tokens:
        ended = "max tokens"
    if live:
        print(shown(parts[-1]), file=out, flush=True)
        rate = f"{count / max(seconds, 1e-9):.0f} tokens/s"
        print(f"isthmus: {len(prompt)} + {count} tokens, {rate}; {ended}", file=sys.stderr)
    else:
        facts = {"prompt": args.prompt, "text": "".join(parts), "prompt_tokens": len(prompt)}
        print(json.dumps(facts | {"tokens": count, "seconds": seconds, "ended": ended}))
    return 0
