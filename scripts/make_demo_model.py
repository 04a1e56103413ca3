"""Makes serving/demo_model: a small Qwen3-MoE checkpoint that speaks a few sentences.

    python scripts/make_demo_model.py [FOLDER]

With this model the commands work without a download. It is a real checkpoint: the files,
names and network are those of Qwen3MoeForCausalLM. Nothing is trained by gradient descent:

    1. A text about ferries, harbours, pages and caches is written (demo_text.py).
    2. A byte-level BPE vocabulary is learned from it.
    3. Embeddings are random signs. Heads of layer 0 look exactly 1, 2 and 3 tokens back and
       copy those signs beside the token's own; all other attention is small and random.
    4. Routers, gates and up projections are random. Layer by layer, the down projections of
       the experts are fitted by least squares, so that the residual stream moves towards
       the code of the next token, which lm_head reads off.

The same bytes come out on every run: seeds are fixed and sums are in float64, far finer
than the bfloat16 they are rounded to. Needs numpy and tokenizers.
"""

import itertools
import json
import re
import sys
from pathlib import Path

import numpy as np
import tokenizers
from demo_text import COMMON, Writer
from tokenizers import decoders, models, pre_tokenizers, trainers

SEED = 20
DOCUMENTS = 220
VOCAB = 2048
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 4, 192, 8, 4, 32
EXPERTS, CHOSEN, EXPERT_DIM = 16, 4, 64
ROPE_THETA, EPS = 10000.0, 1e-6

# The parts of the residual stream.
OWN = slice(0, 48)  # signs of the token itself
ONE = 48  # always 1
BACK = (slice(49, 81), slice(81, 113), slice(113, 128))  # signs of the tokens 1, 2, 3 back
NEXT = slice(128, 192)  # grows towards the code of the next token

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = """\
{%- if not messages %}
    {{- raise_exception('a conversation needs at least one message') }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('no such role: ' ~ message.role) }}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- elif message.content %}
        {%- for part in message.content %}
            {%- if part.type != 'text' %}
                {{- raise_exception('this model reads text only, got ' ~ part.type) }}
            {%- endif %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# --- the vocabulary -------------------------------------------------------------------------------


def learn_vocabulary(documents: list[str]) -> tokenizers.Tokenizer:
    """A byte-level BPE of VOCAB entries, with the special tokens last."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    plain = [re.sub(r"<\|\w+\|>(user|assistant)?", "", text) for text in documents]
    common = [f" {word} {word}" for word in COMMON.split()]
    roles = ["user assistant system tool"] * 50
    tokenizer.train_from_iterator(plain + common + roles, trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    size = tokenizer.get_vocab_size()
    assert size == VOCAB, f"the text gives {size} entries, not {VOCAB}: write more"
    return tokenizer


# --- the network, in float64 --------------------------------------------------------------------


def to_bfloat16(array: np.ndarray) -> np.ndarray:
    """u16[...]: bfloat16 bits, the upper halves of float32, rounded to nearest even."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def rounded(array: np.ndarray) -> np.ndarray:
    """f64 of the bfloat16 values that the file will hold."""
    return (to_bfloat16(array).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * weight


def rotate(x: np.ndarray) -> np.ndarray:
    """Rotary positions applied to x[tokens, heads, HEAD_DIM]; pairs are entries of both halves."""
    half = HEAD_DIM // 2
    angles = np.arange(x.shape[0])[:, None] * frequencies()[None, :]
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def frequencies() -> np.ndarray:
    return ROPE_THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)


def attend(x: np.ndarray, w: dict[str, np.ndarray]) -> np.ndarray:
    """Causal grouped-query attention of one document x[tokens, HIDDEN], already normalised."""
    n = x.shape[0]
    q = rms_norm((x @ w["q_proj"].T).reshape(n, HEADS, HEAD_DIM), w["q_norm"])
    k = rms_norm((x @ w["k_proj"].T).reshape(n, KV_HEADS, HEAD_DIM), w["k_norm"])
    v = (x @ w["v_proj"].T).reshape(n, KV_HEADS, HEAD_DIM)
    q, k = rotate(q), rotate(k)
    k, v = np.repeat(k, HEADS // KV_HEADS, axis=1), np.repeat(v, HEADS // KV_HEADS, axis=1)
    q, k, v = (part.transpose(1, 0, 2) for part in (q, k, v))
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(HEAD_DIM)
    scores = np.where(np.tri(n, dtype=bool)[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ v).transpose(1, 0, 2).reshape(n, -1) @ w["o_proj"].T


def expert_features(x: np.ndarray, w: dict[str, np.ndarray]) -> np.ndarray:
    """f64[tokens, EXPERTS * EXPERT_DIM]: inputs of the down projections times router weights."""
    scores = x @ w["gate"].T
    chosen = np.argsort(-scores, axis=-1, kind="stable")[:, :CHOSEN]
    best = np.take_along_axis(scores, chosen, axis=-1)
    best = np.exp(best - best.max(axis=-1, keepdims=True))
    weights = np.zeros_like(scores)
    np.put_along_axis(weights, chosen, best / best.sum(axis=-1, keepdims=True), axis=-1)
    gate, up = (x @ w[name].reshape(-1, HIDDEN).T for name in ("gate_proj", "up_proj"))
    return np.repeat(weights, EXPERT_DIM, axis=-1) * gate / (1 + np.exp(-gate)) * up


# --- its weights --------------------------------------------------------------------------------


def attention_weights(layer: int, random: np.random.RandomState) -> dict[str, np.ndarray]:
    w = {
        "input_layernorm": 1 + 0.1 * random.randn(HIDDEN),
        "post_attention_layernorm": 1 + 0.1 * random.randn(HIDDEN),
        "q_proj": random.randn(HEADS * HEAD_DIM, HIDDEN) / np.sqrt(HIDDEN),
        "k_proj": random.randn(KV_HEADS * HEAD_DIM, HIDDEN) / np.sqrt(HIDDEN),
        "v_proj": random.randn(KV_HEADS * HEAD_DIM, HIDDEN) / np.sqrt(HIDDEN),
        # Large enough for every key and value to change the text, too small to break it.
        "o_proj": 0.25 * random.randn(HIDDEN, HEADS * HEAD_DIM) / np.sqrt(HIDDEN),
        "q_norm": 1 + 0.1 * random.randn(HEAD_DIM),
        "k_norm": 1 + 0.1 * random.randn(HEAD_DIM),
    }
    if layer == 0:
        look_back(w)
    return {name: rounded(value) for name, value in w.items()}


def look_back(w: dict[str, np.ndarray]) -> None:
    """Make heads 0, 2, 4 see the tokens 1, 2, 3 back.

    Every key is the same vector, the query is that vector rotated back by as many positions, and
    the norms make the softmax sharp.
    """
    w["input_layernorm"][:] = 1
    w["q_norm"][:] = w["k_norm"][:] = 8
    # Each token has entries of size 1 in OWN and ONE and no others, so the norm multiplies by this.
    scale = 1 / np.sqrt((OWN.stop + 1) / HIDDEN)
    w["o_proj"][OWN] = w["o_proj"][ONE] = 0
    for distance, place in enumerate(BACK, start=1):
        head = 2 * (distance - 1)
        query = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        key = slice((distance - 1) * HEAD_DIM, distance * HEAD_DIM)
        width = place.stop - place.start
        for name in ("q_proj", "k_proj"):
            w[name][query if name == "q_proj" else key] = 0
        turn = distance * frequencies()
        w["q_proj"][query, ONE] = np.concatenate([np.cos(turn), -np.sin(turn)])
        w["k_proj"][key, ONE] = np.concatenate([np.ones(HEAD_DIM // 2), np.zeros(HEAD_DIM // 2)])
        w["v_proj"][key] = 0
        w["v_proj"][key, :HEAD_DIM] = np.eye(HEAD_DIM)
        w["o_proj"][place] = 0
        w["o_proj"][place, query] = np.eye(HEAD_DIM)[:width] / scale


def expert_weights(layer: int, random: np.random.RandomState) -> dict[str, np.ndarray]:
    """Random features of a token and of as many tokens before it as the layer's number."""
    reach = np.zeros(HIDDEN)
    reach[OWN] = reach[ONE] = 1
    for place in BACK[:layer]:
        reach[place] = 1
    size = 1 / np.sqrt(reach.sum())
    return {
        "gate": rounded(1.2 * size * random.randn(EXPERTS, HIDDEN) * reach),
        "gate_proj": rounded(1.5 * size * random.randn(EXPERTS, EXPERT_DIM, HIDDEN) * reach),
        "up_proj": rounded(size * random.randn(EXPERTS, EXPERT_DIM, HIDDEN) * reach),
    }


def fit_down(features: np.ndarray, wanted: np.ndarray, ridge: float) -> np.ndarray:
    """f64[EXPERTS, HIDDEN, EXPERT_DIM]: least squares with a ridge, onto the NEXT part only."""
    gram = features.T @ features
    gram[np.diag_indices_from(gram)] += ridge * np.trace(gram) / len(gram)
    solution = np.linalg.solve(gram, features.T @ wanted)
    down = np.zeros((EXPERTS, HIDDEN, EXPERT_DIM))
    down[:, NEXT, :] = solution.reshape(EXPERTS, EXPERT_DIM, -1).transpose(0, 2, 1)
    return rounded(down)


def build(texts: list[list[int]]) -> dict[str, np.ndarray]:
    """All tensors by their Hugging Face names, f64 that bfloat16 holds exactly."""
    random = np.random.RandomState(SEED)
    embed = np.zeros((VOCAB, HIDDEN))
    embed[:, OWN] = random.choice([-1.0, 1.0], (VOCAB, OWN.stop))
    embed[:, ONE] = 1

    bounds = np.cumsum([0, *map(len, texts)])
    ids = np.concatenate([np.asarray(text) for text in texts])
    has_next = np.ones(len(ids), bool)
    has_next[bounds[1:] - 1] = False
    next_ids = np.roll(ids, -1)
    codes = next_codes(ids[has_next], next_ids[has_next], random)

    tensors = {"model.embed_tokens.weight": embed}
    x = embed[ids]
    for layer in range(LAYERS):
        w = attention_weights(layer, random) | expert_weights(layer, random)
        for start, stop in itertools.pairwise(bounds):
            x[start:stop] += attend(rms_norm(x[start:stop], w["input_layernorm"]), w)
        features = expert_features(rms_norm(x, w["post_attention_layernorm"]), w)
        missing = codes[next_ids] - x[:, NEXT]
        w["down_proj"] = fit_down(features[has_next], missing[has_next], ridge=0.02)
        down = w["down_proj"][:, NEXT, :].transpose(1, 0, 2).reshape(codes.shape[1], -1)
        x[:, NEXT] += features @ down.T
        tensors |= layer_tensors(layer, w)
        hits = np.argmax(x[:, NEXT] @ codes.T, axis=-1) == next_ids
        print(f"layer {layer}: next token of the text found in {hits[has_next].mean():.0%}")

    # A certain next token gets a logit of about 16, and a frequent one a little more.
    common = np.log(np.maximum(np.bincount(ids, minlength=VOCAB), 0.02))
    one = np.mean(rms_norm(x, np.ones(HIDDEN))[:, ONE])
    lm_head = np.zeros((VOCAB, HIDDEN))
    lm_head[:, NEXT] = rounded(16 / one * codes / codes.shape[1])
    lm_head[:, ONE] = rounded(0.5 / one * (common - common.max()))
    return tensors | {"model.norm.weight": np.ones(HIDDEN), "lm_head.weight": lm_head}


def next_codes(ids: np.ndarray, next_ids: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    """f64[VOCAB, NEXT], of mean square 1: the code that the stream should show before each token.

    A code is partly the token's own random signs, partly the sum of its neighbours' signs. Tokens
    that stand in the same places have similar codes. So where many tokens could follow, any of
    them is likely and others are not. Source of the idea: random indexing, Kanerva et al.,
    CogSci 2000.
    """
    shape = (VOCAB, NEXT.stop - NEXT.start)
    own, before, after = (random.choice([-1.0, 1.0], shape) for _ in range(3))
    company = np.zeros(shape)
    np.add.at(company, next_ids, before[ids])
    np.add.at(company, ids, after[next_ids])
    seen = np.any(company != 0, axis=-1)
    company[seen] /= np.linalg.norm(company[seen], axis=-1, keepdims=True)
    company[seen] -= company[seen].mean(axis=0)
    company[seen] /= np.sqrt(np.mean(company[seen] ** 2, axis=-1, keepdims=True))
    codes = 0.6 * own + 0.8 * company
    return codes / np.sqrt(np.mean(codes**2, axis=-1, keepdims=True))


def layer_tensors(layer: int, w: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    prefix = f"model.layers.{layer}"
    tensors = {
        f"{prefix}.{name}.weight": w[name]
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
        tensors[f"{prefix}.self_attn.{name}.weight"] = w[name]
    tensors[f"{prefix}.mlp.gate.weight"] = w["gate"]
    for expert in range(EXPERTS):
        for name in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"{prefix}.mlp.experts.{expert}.{name}.weight"] = w[name][expert]
    return tensors


# --- the files ----------------------------------------------------------------------------------


def write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_tensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write the safetensors format: length of the header, header, data.

    The library takes only numpy arrays, which have no bfloat16, so it cannot write these.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, array in sorted(tensors.items()):
        end = place + 2 * array.size
        header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, array in sorted(tensors.items()):
            out.write(to_bfloat16(array).astype("<u2").tobytes())


def write_settings(folder: Path, tokenizer: tokenizers.Tokenizer) -> None:
    end_of_text, start, end = (tokenizer.token_to_id(token) for token in SPECIAL)
    write_json(
        folder / "config.json",
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": end_of_text,
            "decoder_sparse_step": 1,
            "eos_token_id": end,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "intermediate_size": 4 * HIDDEN,
            "max_position_embeddings": 4096,
            "mlp_only_layers": [],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": EXPERT_DIM,
            "norm_topk_prob": True,
            "num_attention_heads": HEADS,
            "num_experts": EXPERTS,
            "num_experts_per_tok": CHOSEN,
            "num_hidden_layers": LAYERS,
            "num_key_value_heads": KV_HEADS,
            "rms_norm_eps": EPS,
            "rope_scaling": None,
            "rope_theta": ROPE_THETA,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": VOCAB,
        },
    )
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": end_of_text, "do_sample": True, "eos_token_id": [end, end_of_text],
         "pad_token_id": end_of_text, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    )  # fmt: skip
    added = {
        str(token_id): {"content": token, "lstrip": False, "normalized": False, "rstrip": False,
                        "single_word": False, "special": True}
        for token, token_id in zip(SPECIAL, (end_of_text, start, end), strict=True)
    }  # fmt: skip
    write_json(
        folder / "tokenizer_config.json",
        {"added_tokens_decoder": added, "additional_special_tokens": list(SPECIAL[1:]),
         "bos_token": None, "chat_template": CHAT_TEMPLATE,
         "clean_up_tokenization_spaces": False, "eos_token": SPECIAL[2],
         "model_max_length": 4096, "pad_token": SPECIAL[0],
         "tokenizer_class": "PreTrainedTokenizerFast"},
    )  # fmt: skip


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    documents = list(Writer(np.random.RandomState(SEED)).documents(DOCUMENTS))
    tokenizer = learn_vocabulary(documents)
    texts = [tokenizer.encode(text).ids for text in documents]
    print(f"{len(documents)} documents, {sum(map(len, texts))} tokens, {VOCAB} entries")
    write_tensors(folder / "model.safetensors", build(texts))
    tokenizer.save(str(folder / "tokenizer.json"))
    write_settings(folder, tokenizer)


if __name__ == "__main__":
    default = Path(__file__).resolve().parents[1] / "serving" / "demo_model"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
