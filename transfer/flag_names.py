"""Names of flags: that of a field, and the one that was meant by an unknown name."""

import difflib
from collections.abc import Collection
from typing import Final

_ADAPTERS: Final = "--lora-paths"
# Names of SGLang and vLLM, as of 2026. Some are spelt like a flag of ours that means another thing.
_ELSEWHERE: Final = {
    "--api-server-count": "--api-workers",
    "--block-size": "--page-size",
    "--data-parallel-size": "--dp-size",
    "--dp": "--dp-size",
    "--enable-auto-tool-choice": "--tool-call-parser",
    "--enable-expert-parallel": "--ep-size",
    "--enable-lora": _ADAPTERS,
    "--ep": "--ep-size",
    "--expert-parallel-size": "--ep-size",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--kv-offloading-size": "--hicache-size",
    "--kv-transfer-config": "--disaggregation-transfer-backend",
    "--lora-modules": _ADAPTERS,
    "--max-lora-rank": _ADAPTERS,
    "--max-loras": _ADAPTERS,
    "--max-loras-per-batch": _ADAPTERS,
    "--max-model-len": "--context-length",
    "--max-num-batched-tokens": "--chunked-prefill-size",
    "--max-num-seqs": "--max-running-requests",
    "--max-prefill-tokens": "--chunked-prefill-size",
    "--no-enable-prefix-caching": "--disable-radix-cache",
    "--speculative-config": "--speculative-algorithm",
    "--tensor-parallel-size": "--tp-size",
    "--tp": "--tp-size",
}
_ROLES: Final = "--disaggregation-mode"


def flag_name(field: str) -> str:
    """`queue_timeout_s` -> `--queue-timeout`."""
    return "--" + field.removesuffix("_s").replace("_", "-")


def hint(flag: str, known: Collection[str]) -> str:
    """What to add to the error about an unknown flag; "" for nothing."""
    if flag == _ROLES:
        return "; each role is a command: kvferry prefill, kvferry decode, kvferry up for all"
    ours = _ELSEWHERE.get(flag, flag if flag == _ADAPTERS else None)
    if ours == _ADAPTERS and ours not in known:
        return f"; prefill, decode and up take adapters, by {_ADAPTERS}"
    # Names with something in front: --decode-page-size is --page-size.
    shorter = [name for name in known if name[:2] == "--" and flag.endswith(name[1:])]
    if ours is None and shorter:
        close = [max(shorter, key=len)]
    elif ours is None:
        close = difflib.get_close_matches(flag, known, n=1)
    else:
        close = [ours] if ours in known else []
    return "".join(f"; did you mean {name}?" for name in close)
