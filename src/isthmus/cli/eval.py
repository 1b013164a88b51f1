"""`isthmus eval`: a trained model's loss on unseen text."""

import argparse
import json
import sys
from pathlib import Path

from isthmus.cli.arguments import add_batches, add_corpus, add_device, add_json, check_model_arguments
from isthmus.errors import ConfigError
from isthmus.runlog import finite

EPILOG = """examples:
  isthmus eval runs/demo
  isthmus eval runs/demo --batches 0 --json            all of the held-out text
  isthmus eval s3://my-runs/first --corpus corpus/
  isthmus eval demo-hf --harness hellaswag,arc_easy    needs: pip install 'isthmus[eval]'
full: the whole model. pipelined: through the boundaries. mixed: the mean over replicas, each as it trains.
"""


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "eval",
        help="held-out loss, perplexity and bits per byte; the lm-evaluation-harness",
        description="Held-out loss, perplexity and bits per byte of a run's model, by kind of forward.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "source", metavar="RUN", help="a run directory, a bucket's URL or folder, or an exported folder"
    )
    add_corpus(parser)
    add_batches(parser)
    parser.add_argument(
        "--harness", metavar="TASKS", help="also run these tasks of the lm-evaluation-harness, by commas"
    )
    parser.add_argument("--include", metavar="DIR", help="where the harness finds tasks of your own")
    add_device(parser)
    add_json(parser)
    parser.set_defaults(run=evaluate)


def evaluate(args: argparse.Namespace) -> int:
    tasks = [task.strip() for task in (args.harness or "").split(",") if task.strip()]
    if args.harness is not None and not tasks:
        raise ConfigError("--harness names no task; write them as hellaswag,arc_easy")
    if args.include is not None and not tasks:
        raise ConfigError("--include says where the harness finds tasks; give --harness TASKS with it")
    if args.include is not None and not Path(args.include).is_dir():
        raise ConfigError(f"--include: there is no folder {args.include}; give the one with your tasks")
    check_model_arguments(args)
    from isthmus.export.scores import evaluate as score

    found = score(
        args.source,
        corpus=args.corpus,
        num_batches=args.batches,
        device=args.device,
        tasks=tasks,
        include=args.include,
    )
    if args.json:
        print(json.dumps(finite(found), indent=2))
        return 0
    if "round" in found:
        print(f"isthmus: {args.source}, round {found['round']}", file=sys.stderr)
    if "forwards" in found:
        print(f"{found['held_out_tokens']:,} held-out tokens, {found['bytes_per_token']:.3f} bytes each")
        print(f"{'forward':<12}{'loss':>10}{'perplexity':>14}{'bits per byte':>16}")
        for name, score in found["forwards"].items():
            if score:
                shown = f"{score['loss']:>10.4f}{score['perplexity']:>14.2f}{score['bits_per_byte']:>16.4f}"
                print(f"{name:<12}{shown}")
    for task, scores in found.get("harness", {}).items():
        for name, value in scores.items():
            print(f"{task}  {name}  {value:.4f}")
    return 0
