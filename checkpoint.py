"""Checkpoints as files: finding them, and loading that cannot half succeed. And InputError, by which every command here refuses what it is given."""
import argparse
import json
import os
import re
import signal
import sys
from pathlib import Path

import torch
import torch.nn as nn


class InputError(Exception):
    """The user's input cannot be served: one clear sentence. Command lines print it to stderr and exit with code 2."""


class Parser(argparse.ArgumentParser):
    """A command line whose mistakes are InputErrors, too."""

    def error(self, message):
        raise InputError(f"{message}; --help lists the options")


def command_line(main, leave=sys.exit):
    """Run a command, then end the process: with main's code, or 2 and a sentence on stderr where user or system is at fault, or 130 for Ctrl-C.

    leave: os._exit for a command whose threads may still wait for a server, which sys.exit would wait for, too.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)      # as Ctrl-C
    sys.stderr = sys.stderr or open(os.devnull, "w")               # a closed one would send what is said to stdout
    for file in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(file, "reconfigure"):                           # odd bytes in a pipe, or a terminal that knows ASCII alone, are no reason to stop
            file.reconfigure(errors="replace")
    try:
        code = main() or 0
        if sys.stdout:
            sys.stdout.flush()
    except InputError as error:
        code, said = 2, str(error)
    except torch.OutOfMemoryError:
        code, said = 2, "the device has not the memory for this; a smaller --batch-size needs less"
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(130)                      # without a flush of a pipe that is closed
    except OSError as error:
        code, said = 2, f"{error.filename or 'the output'} cannot be written ({error.strerror})"
        try:
            sys.stdout.flush()
        except OSError:                    # it is the output itself, which sys.exit would flush once more
            leave = os._exit
    if code == 2:
        print(f"error: {said}", file=sys.stderr, flush=True)
    leave(code)


def checkpoint_dir(name):
    """A local directory as it is; a hub id ("Qwen/Qwen3-8B") downloaded, or from the cache when there is no network. -> Path"""
    if str(name) and Path(name).is_dir():
        return Path(name)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)) or Path(name).exists():
        raise InputError(f"{name}: no such directory, and not a hub id of the form owner/name")
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(str(name), allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except Exception as error:       # httpx, OSError and a dozen hub errors: all of them mean the same to the user
        reason = str(error).strip().splitlines()
        raise InputError(f"{name}: no such directory, and as a hub id not in the local cache and not to be had from the hub ({reason[0] if reason else type(error).__name__})")


def read_json(path):
    """A JSON object from a file. InputError where it is missing or broken."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file")
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON ({error})")
    if not isinstance(value, dict):
        raise InputError(f"{path}: a JSON object was expected")
    return value


def weight_files(directory):
    """The safetensors files of a checkpoint -> {path: names that the index puts there, or None where there is no index}."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return {directory / "model.safetensors": None}
    shards = {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
        raise InputError(f"{index}: weight_map, from tensor to file name, is missing or empty or broken")
    for name, file in weight_map.items():
        shards.setdefault(directory / file, set()).add(name)
    return shards


def check_dtype(dtype):
    if dtype not in (torch.float32, torch.bfloat16):
        raise InputError(f"dtype {str(dtype).removeprefix('torch.')} is refused: the hidden states of these models overflow fp16; use float32 or bfloat16")


def load_weights(model, directory, device, dtype, rename=lambda name: name):
    """Fill a model built on the meta device, one tensor at a time, so that memory holds the model and one tensor more.

    `rename` gives the model's name of a stored tensor, or None to pass it over. InputError for a missing, leftover or ill-shaped tensor, and for a broken file.
    """
    from safetensors import SafetensorError, safe_open
    check_dtype(dtype)
    wanted, seen = dict(model.named_parameters()), set()
    for path, listed in weight_files(directory).items():
        if not path.is_file():
            raise InputError(f"{path}: no such file")
        try:
            with safe_open(path, framework="pt") as file:
                stored = set(file.keys())
                if listed and listed != stored:
                    raise InputError(f"{path}: the index and this shard disagree about the tensor {min(listed ^ stored)}")
                for name in sorted(stored):
                    ours = rename(name)
                    if ours is None:
                        continue
                    if ours not in wanted:
                        raise InputError(f"{path}: the tensor {name} has no place in this model")
                    shape, expected = tuple(file.get_slice(name).get_shape()), tuple(wanted[ours].shape)
                    if shape != expected:
                        raise InputError(f"{path}: the tensor {name} has shape {shape}, config.json asks for {expected}")
                    tensor = file.get_tensor(name)
                    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                        raise InputError(f"{path}: the tensor {name} is {tensor.dtype}, quantised weights are not supported")
                    tensor = tensor.to(device, dtype, copy=True)
                    if not tensor.isfinite().all():
                        raise InputError(f"{path}: the tensor {name} holds NaN or infinity")
                    owner, _, leaf = ours.rpartition(".")
                    setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
                    seen.add(ours)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: not a whole safetensors file ({error})")
    if missing := sorted(wanted.keys() - seen):
        raise InputError(f"{directory}: tensors missing from the weights: {', '.join(missing[:3])}{' ...' * (len(missing) > 3)} ({len(missing)} in all)")
