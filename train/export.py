"""A checkpoint for others: in another engine's layout, or on the hub.

    python train/main.py export --checkpoint RUN/checkpoints/step-000330 --to speculators OUT
    python train/main.py push --checkpoint RUN/checkpoints/step-000330 --repo ORG/NAME --dry-run

The checkpoint folder itself is z-lab's layout, which z-lab's code, vLLM and SGLang load as it is.

    zlab          that layout without the training state
    sglang        the same, with the rope settings also where SGLang on transformers 4 looks for them
    speculators   vLLM speculators: aux layer id = tap + 1, the target's name, `vllm serve OUT` needs nothing else
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from configs.load import UserError, load_config
from extract.locate import locate, unpack_gguf
from train.drafter import FULL, DFlashDrafter
from train.finished import DONE, is_unfinished, require_intact
from train.layout import checkpoint_config, load_drafter, read_tensors, write_config, write_weights

SPECULATORS_VERSION = "0.9.0"  # whose loader and converter judge the export
KEPT = ("README.md",)
LEFT_OUT = ("resume/*", DONE, ".*")


def main(argv: Sequence[str]) -> int | None:
    args = parser().parse_args(argv)
    if not args.checkpoint.is_dir():
        raise UserError(f"there is no folder {args.checkpoint}; give a checkpoint folder")
    if args.command == "push":
        upload(args.checkpoint, args.repo, private=args.private, dry_run=args.dry_run)
        return None
    write(args.checkpoint, args.to, args.out, args.target)
    print(f"{args.checkpoint} in the layout of {args.to}: {args.out}")
    return None


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="train/main.py", description="A checkpoint for others.", epilog=(__doc__ or "").split("\n\n")[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = out.add_subparsers(dest="command", required=True)
    export = commands.add_parser(
        "export",
        help="write a checkpoint in another layout",
        epilog="example: python train/main.py export --checkpoint runs/mine/checkpoints/step-000330 --to speculators OUT",
    )
    export.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="a checkpoint folder"
    )
    export.add_argument(
        "--to", choices=sorted(WRITERS), required=True, help="the layout, docs/interop.md"
    )
    export.add_argument(
        "--target", help="folder or hub id that the export names; unset: of the run's config.yaml"
    )
    export.add_argument("out", type=Path, metavar="OUT", help="a folder that does not exist yet")
    push = commands.add_parser(
        "push",
        help="upload a checkpoint or an export to the hub",
        epilog="example: python train/main.py push --checkpoint runs/mine/checkpoints/step-000330 --repo ORG/NAME "
        "--dry-run. Uploading takes HF_TOKEN.",
    )
    push.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="a checkpoint or an export"
    )
    push.add_argument("--repo", required=True, metavar="ORG/NAME", help="on the Hugging Face hub")
    push.add_argument("--private", action="store_true", help="make the repository private")
    push.add_argument("--dry-run", action="store_true", help="list the files and upload nothing")
    return out


def write(checkpoint: Path, layout: str, out: Path, target: str | None = None) -> None:
    """Write OUT, complete or not at all. UserError for what the layout cannot say."""
    if out.exists():
        raise UserError(f"{out} exists; give a folder that does not")
    try:
        model = load_drafter(checkpoint)
    except ValueError as error:
        raise UserError(str(error)) from None
    if model.shape.num_target_layers is None:
        raise UserError(
            f"{checkpoint} does not say how many layers its target has; train it with drafter.init_from first"
        )
    if model.shape.sample_from_anchor:
        raise UserError(
            f"{checkpoint} drafts from slot 0 as well (sample_from_anchor), and the DFlash loaders of z-lab, vLLM and "
            "SGLang start at slot 1; there is nothing to export it to"
        )
    state = model.state_dict()
    stored = next(iter(read_tensors(checkpoint).values())).dtype
    config = WRITERS[layout](model, checkpoint, checkpoint_config(model, stored), target)
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_weights(state, temporary, stored)
    write_config(config, temporary)
    for name in KEPT:
        if (checkpoint / name).exists():
            shutil.copy(checkpoint / name, temporary / name)
    temporary.rename(out)


def zlab(
    model: DFlashDrafter, checkpoint: Path, config: dict[str, Any], target: str | None
) -> dict[str, Any]:
    return config


def sglang(
    model: DFlashDrafter, checkpoint: Path, config: dict[str, Any], target: str | None
) -> dict[str, Any]:
    if model.config.hidden_act != "silu" or model.shape.input_embedding_scale != 1.0:
        raise UserError(
            f"SGLang's loader has neither hidden_act {model.config.hidden_act} other than silu nor "
            f"input_embedding_scale {model.shape.input_embedding_scale:g} other than 1"
        )
    rope = dict(model.config.rope_parameters)
    theta = rope.pop("rope_theta")
    scaled = rope if rope.get("rope_type", "default") != "default" else None
    return config | {"rope_theta": theta, "rope_scaling": scaled}


def speculators(
    model: DFlashDrafter, checkpoint: Path, config: dict[str, Any], target: str | None
) -> dict[str, Any]:
    shape, kinds = model.shape, set(model.config.layer_types)
    own = (shape.input_embedding_scale, shape.output_multiplier, shape.final_logit_softcapping)
    if own != (1.0, 1.0, None):
        raise UserError(
            "the speculators layout has no input_embedding_scale, output_multiplier and final_logit_softcapping, "
            f"which are {own} here; serve the checkpoint folder itself"
        )
    causal = {shape.causal(kind) for kind in kinds}
    if len(causal) > 1 or (FULL in kinds and True in causal):
        raise UserError(
            "in the speculators layout full layers are bidirectional inside the block, and vLLM applies "
            "sliding_window_non_causal to full layers too, so a drafter that is causal in some of its layers and has "
            "full ones cannot be served from it; serve the checkpoint folder itself"
        )
    name, architectures = verifier(checkpoint, target)
    layers = model.config.to_dict() | {"model_type": "qwen3", "architectures": None}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": shape.block_size - 1}
            ],
            "verifier": {"name_or_path": name, "architectures": architectures},
        },
        "transformer_layer_config": layers,
        "draft_vocab_size": model.config.vocab_size,
        "target_hidden_size": model.config.hidden_size,
        "block_size": shape.block_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in shape.target_layer_ids],
        "mask_token_id": shape.mask_token_id,
        # vLLM reads false as "causal", in full layers too; speculators' own default is false
        "sliding_window_non_causal": causal == {False},
        "sample_from_anchor": False,
        "num_target_layers": shape.num_target_layers,
        "dtype": config["dtype"],
        **({"paceline": model.origin} if model.origin else {}),
    }


WRITERS = {"zlab": zlab, "sglang": sglang, "speculators": speculators}


def verifier(checkpoint: Path, target: str | None) -> tuple[str, list[str]]:
    """(folder or hub id, architectures) of the target. UserError when neither --target nor the run tells."""
    if target is None:
        file = checkpoint.resolve().parent.parent / "config.yaml"
        if not file.exists():
            raise UserError(
                f"{checkpoint} does not lie in a run folder; name its target with --target"
            )
        target = unpack_gguf(locate(load_config(file).target)).source
    try:
        found = AutoConfig.from_pretrained(target).architectures
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the config of {target}: {error}") from None
    return target, list(found or [])


def upload(folder: Path, repo: str, *, private: bool, dry_run: bool) -> None:
    """Put a checkpoint on the hub, without its training state. The token comes from the environment (HF_TOKEN)."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import filter_repo_objects

    if is_unfinished(folder):
        raise UserError(
            f"checkpoint {folder} was never finished (it has no {DONE}); choose another"
        )
    try:
        require_intact(folder)
    except ValueError as error:
        raise UserError(str(error)) from None
    files = sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())
    files = list(filter_repo_objects(files, ignore_patterns=list(LEFT_OUT)))
    if missing := {"config.json", "README.md"} - set(files):
        raise UserError(f"{folder} has no {' and no '.join(sorted(missing))}; is it a checkpoint?")
    for name in files:
        print(f"{(folder / name).stat().st_size:>14,}  {name}")
    if dry_run:
        print(f"nothing uploaded; without --dry-run these go to {repo}")
        return
    token = os.environ.get("HF_TOKEN")
    if not token:
        raise UserError("push needs a write token in the environment variable HF_TOKEN")
    api = HfApi(token=token)
    api.create_repo(repo, private=private, exist_ok=True)
    done = api.upload_folder(
        repo_id=repo,
        folder_path=folder,
        ignore_patterns=list(LEFT_OUT),
        commit_message=f"Upload {folder.name}",
    )
    print(f"uploaded: {done.commit_url}")
