"""What an attacker puts into a folder that somebody else will read or write."""

import json
from pathlib import Path


def plant_code(folder: Path) -> Path:
    """Code in every place of an exported folder from which transformers would run it. Returns the file that
    this code writes when it runs."""
    hit = folder.parent / f"{folder.name}-was-run"
    code = f"open({str(hit)!r}, 'w').write('run')\n"
    imports = "from .modeling_isthmus import IsthmusConfig as C, IsthmusForCausalLM as M\n"
    for name in ("evil.py", "tokenization_evil.py", "configuration_evil.py", "custom_generate/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code + (imports if name == "evil.py" else ""))
    if (folder / "modeling_isthmus.py").exists():
        (folder / "modeling_isthmus.py").write_text(code)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch " + str(hit).encode() + b"'\ntR.")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "auto_mapping": {}}))
    add_keys(
        folder / "config.json",
        auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"},
        attn_implementation="evil/kernels",
    )
    add_keys(
        folder / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["tokenization_evil.T", "tokenization_evil.T"]},
    )
    return hit


def add_keys(path: Path, **keys: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
