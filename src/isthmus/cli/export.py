"""`isthmus export`: a run's model as a folder that other programs load."""

import argparse
import json
from pathlib import Path

from isthmus.cli.arguments import add_batches, add_corpus, add_device, add_json, check_model_arguments
from isthmus.errors import ConfigError
from isthmus.runlog import finite

EPILOG = """examples:
  isthmus export runs/demo --to hf demo-hf            then: AutoModelForCausalLM.from_pretrained("demo-hf")
  isthmus export s3://my-runs/first --to hf first-hf  the newest settled round, also while the run continues
  isthmus export runs/demo --to hf demo-hf --dtype bf16
  isthmus export runs/pp --to hf pp-hf --as pipelined
A model that was trained only through compressed boundaries can be far worse without them. Both losses are
measured on held-out text and printed, and a plain model that is more than 2 % worse is not written.
"""


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "export",
        help="write a run's model as a Hugging Face folder",
        description="Write the newest model of a run as a Hugging Face folder: config, "
        "safetensors, tokenizer, model card.",
        epilog=EPILOG,
    )
    parser.add_argument("source", metavar="RUN", help="a run directory, or a bucket's URL or folder")
    parser.add_argument(
        "--to", nargs=2, required=True, metavar=("hf", "DIR"), help="the format, and a new folder"
    )
    parser.add_argument(
        "--as",
        dest="as_",
        default="plain",
        choices=("plain", "pipelined"),
        help="plain (default): a standard LLaMA; pipelined: with its boundaries and a small model file",
    )
    parser.add_argument(
        "--replica", metavar="NAME", help="whose boundaries to keep (default: the first compressed replica)"
    )
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"), help="of the weights written")
    parser.add_argument("--force", action="store_true", help="write a plain model however much worse it is")
    add_corpus(parser)
    add_batches(parser)
    add_device(parser)
    add_json(parser)
    parser.set_defaults(run=export)


def export(args: argparse.Namespace) -> int:
    kind, target = args.to
    if kind != "hf":
        raise ConfigError(f'--to is "{kind}"; the only format is hf: --to hf DIR')
    if args.replica and args.as_ != "pipelined":
        raise ConfigError("--replica says whose boundaries to keep; give --as pipelined with it")
    check_model_arguments(args)
    from isthmus.export.folder import export as write

    done = write(
        args.source,
        Path(target),
        as_=args.as_,
        replica=args.replica,
        dtype=args.dtype,
        force=args.force,
        corpus=args.corpus,
        num_batches=args.batches,
        device=args.device,
    )
    losses, trained = done.losses, done.trained
    if args.json:
        facts = {
            "folder": None if done.refused else str(done.folder),
            "as": args.as_,
            "dtype": args.dtype,
            "round": trained.round,
            "tokens": trained.tokens,
            "held_out_tokens": losses.num_tokens,
            "loss_plain": losses.plain,
            "loss_full": losses.full,
            "loss_pipelined": losses.pipelined,
            "loss_mixed": losses.mixed,
        }
        print(json.dumps(finite(facts), indent=2))
    else:
        print(f"Round {trained.round}, held-out loss in nats over {losses.num_tokens:,} tokens:")
        print(f"  {losses.plain:.4f}  as a plain model ({args.dtype} weights)")
        if losses.pipelined is not None:
            print(f"  {losses.pipelined:.4f}  through the boundaries of its pipelined replicas")
        print(f"  {losses.mixed:.4f}  as the run trained it (mean over its replicas)")
    if done.refused:
        raise ConfigError(done.refused)
    if not args.json:
        print(f"Written: {done.folder}")
    return 0
