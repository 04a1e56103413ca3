"""`kvferry convert`: turns a Hugging Face checkpoint into a sharded Orbax one."""

import logging
import signal
from collections.abc import Sequence
from typing import NoReturn

import jax
import jax.numpy as jnp
from tqdm import tqdm

from model import kernels
from model.config import ModelConfig
from model.devices import prepare_devices
from model.orbax import save_orbax
from model.sharding import make_mesh
from model.transformer import Model
from transfer import flags, terminal
from transfer.errors import ConfigError


def main(argv: Sequence[str], prog: str = "kvferry convert") -> None:
    """Write the converted checkpoint; every command takes its folder as --model-path."""
    parser = flags.Parser(
        prog=prog, description="write a checkpoint in Orbax form, which loads shard by shard"
    )
    parser.add_argument(
        "--model-path",
        type=flags.path,
        required=True,
        metavar="DIR",
        help="folder of a Hugging Face checkpoint",
    )
    parser.add_argument(
        "--output", type=flags.path, required=True, metavar="DIR", help="new folder to write"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="type of the stored weights; auto: the checkpoint's",
    )
    args = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    # What is converted stays in the host's memory: the machine's accelerators may be a server's.
    jax.config.update("jax_platforms", "cpu")
    cfg = ModelConfig.from_dir(args.model_path)
    dtype = cfg.torch_dtype if args.dtype == "auto" else args.dtype
    prepare_devices(1)
    logging.getLogger(kernels.__name__).setLevel(logging.WARNING)  # it is not computed with
    model = Model.create(cfg, make_mesh(1, 1), jnp.dtype(dtype), page_size=16)
    with tqdm(unit="B", unit_scale=True, desc="converting", disable=None) as bar:

        def progress(done_bytes: int, total_bytes: int) -> None:
            bar.total = total_bytes
            bar.update(done_bytes - bar.n)

        try:
            save_orbax(args.model_path, args.output, model, progress)
        except OSError as error:
            raise ConfigError(f"--output {args.output}: cannot write there: {error}") from error
    terminal.say(f"kvferry: wrote {args.output}; try: kvferry up --model-path {args.output}")


def _end(number: int, *_: object) -> NoReturn:
    """Have what was begun removed. A conversion that is cut off must not exit as if done."""
    raise SystemExit(128 + number)
