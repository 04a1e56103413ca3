"""Names of flags: that of a field, and the one that was meant by an unknown name."""

import difflib
import re
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
    "--enable-dp-attention": "--dp-size",
    "--enable-ep-moe": "--ep-size",
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
    "--port": "--disaggregation-bootstrap-port",  # of the registry, which has no other
    "--speculative-config": "--speculative-algorithm",
    "--tensor-parallel-size": "--tp-size",
    "--tp": "--tp-size",
}
_PIPELINE: Final = "layers are not divided into a pipeline; --tp-size divides each of them"
_CHOSEN: Final = "it is chosen by the platform"
# What is to be said of a name for which there is no flag, at least not of the same command.
_SAID: Final = {
    "--attention-backend": _CHOSEN,
    "--device": "JAX takes the devices that it finds, or those of $JAX_PLATFORMS",
    "--disaggregation-bootstrap-port": "kvferry registry listens there; all others are given "
    "--registry-address HOST:PORT",
    "--disaggregation-mode": "each role is a command: kvferry prefill, kvferry decode, kvferry up "
    "for all",
    "--enable-chunked-prefill": "prompts are always cut into chunks, of --chunked-prefill-size",
    "--enable-prefix-caching": "prefixes are kept unless --disable-radix-cache is given",
    "--grammar-backend": "there is one, llguidance",
    "--log-level": "$KVFERRY_LOG_LEVEL has the level",
    "--moe-a2a-backend": _CHOSEN,
    "--moe-runner-backend": _CHOSEN,
    "--pipeline-parallel-size": _PIPELINE,
    "--pp-size": _PIPELINE,
    "--sampling-backend": _CHOSEN,
    "--schedule-policy": "there is one: prompts are begun in the order in which they came",
    "--speculative-draft-model-path": "drafts are taken from the text, by --speculative-algorithm "
    "NGRAM",
    "--tokenizer": "the tokenizer is the one in --model-path",
    "--tokenizer-path": "the tokenizer is the one in --model-path",
}
_ROLE: Final = re.compile(r"^--(prefill|decode)-")


def flag_name(field: str) -> str:
    """`queue_timeout_s` -> `--queue-timeout`."""
    return "--" + field.removesuffix("_s").replace("_", "-")


def hint(flag: str, known: Collection[str]) -> str:
    """What to add to the error about an unknown flag; "" for nothing."""
    flag = f"--{flag.lstrip('-')}"  # -tp, as others take it too
    role = _ROLE.match(flag)
    plain = f"--{flag[role.end() :]}" if role else flag
    if plain in _SAID and plain not in known:
        return f"; {_SAID[plain]}"
    ours = _ELSEWHERE.get(plain, plain if plain == _ADAPTERS else None)
    if ours == _ADAPTERS and ours not in known:
        return f"; prefill, decode and up take adapters, by {_ADAPTERS}"
    if ours is not None:
        close = [f"{role[0]}{ours[2:]}" if role else ours, ours]
    else:
        # Names with something in front: --decode-page-size is --page-size.
        shorter = [name for name in known if name[:2] == "--" and flag.endswith(name[1:])]
        close = [max(shorter, key=len)] if shorter else difflib.get_close_matches(flag, known, n=1)
    meant = next((name for name in close if name in known), None)
    return f"; did you mean {meant}?" if meant else ""
