"""What a checkpoint says about its routed experts, and those that all tokens go to."""

from dataclasses import dataclass
from typing import Any, Final

from model.fields import REQUIRED, Fields

# Of these, transformers takes the numbers of V3 itself for what a config leaves out, and those of
# no other model: a config has to give them. Weights are normalised by default.
_AS_V3_ITSELF: Final = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM")
# Their scores are sigmoids, corrected when choosing experts.
_THIRD: Final = (*_AS_V3_ITSELF, "Dots1ForCausalLM", "SolarOpenForCausalLM")
_DEEPSEEK: Final = ("DeepseekV2ForCausalLM", *_THIRD)
_QWEN: Final = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
# In these every layer has experts, and intermediate_size is their width.
_EVERYWHERE: Final = (
    "MixtralForCausalLM",
    "GptOssForCausalLM",
    "OlmoeForCausalLM",
    "MiniMaxM2ForCausalLM",
)
_V2_METHODS: Final = ("greedy", "group_limited_greedy")
# More is a mistake, and work for each of them would hardly end.
_MOST_EXPERTS: Final = 10_000  # of a layer
_MOST_EXTRA_LAYERS: Final = 10_000
_DENSE: Final = "dense"
_SPARSE: Final = "sparse"


@dataclass(frozen=True)
class RouterConfig:
    """How a router's logits become experts and weights.

    num_groups > 1: experts are chosen only from the best groups_per_tok groups; a group's score is
    that of its best expert, or the sum of its best two. Source: arXiv:2405.04434, section 2.2;
    arXiv:2412.19437, section 2.1.2.
    """

    sigmoid: bool = False  # of each logit, instead of the softmax over all
    normalise: bool = False  # scale the weights of the chosen experts to a sum of one
    scale: float = 1.0  # of the weights
    bias: bool = False  # of the logits
    correction: bool = False  # added to the scores when choosing, and not to the weights
    num_groups: int = 1
    groups_per_tok: int = 1
    best_two: bool = False


def read_experts(fields: Fields, architecture: str) -> dict[str, Any]:
    """The fields of ModelConfig about experts. Raises ModelError."""
    if architecture in _DEEPSEEK:
        return _deepseek_experts(fields, architecture)
    _refuse_other_routing(fields, architecture)
    if architecture in _QWEN:
        return _qwen_experts(fields, architecture)
    if architecture == "Ernie4_5_MoeForCausalLM":
        return _ernie_experts(fields)
    if architecture == "HunYuanMoEV1ForCausalLM":
        return _hunyuan_experts(fields)
    if architecture == "HYV3ForCausalLM":
        return _hy_experts(fields)
    if architecture in _EVERYWHERE:
        return _experts_everywhere(fields, architecture)
    return {"moe_layers": (False,) * fields.integer("num_hidden_layers")}


def _refuse_other_routing(fields: Fields, architecture: str) -> None:
    """Refuse routing that only DeepSeek's family may ask for."""
    minimax = architecture == "MiniMaxM2ForCausalLM"
    only: dict[str, Any] = {
        "scoring_func": "sigmoid" if minimax else "softmax",
        "routed_scaling_factor": 1.0,
    }
    if fields.values.get("routed_scaling_factor") is False:  # Hunyuan's word for none
        del only["routed_scaling_factor"]
    if minimax:
        only |= {"use_routing_bias": True, "shared_intermediate_size": 0}
    fields.only(only)


def _counts(fields: Fields) -> dict[str, Any]:
    """How many experts a layer has, and how many a token goes to."""
    # Mixtral says num_local_experts, Qwen num_experts; transformers 5 writes the first for both.
    fields.said_once("num_experts", "num_local_experts")
    experts = fields.integer("num_experts", None, high=_MOST_EXPERTS)
    experts = experts or fields.integer("num_local_experts", high=_MOST_EXPERTS)
    return {"num_experts": experts, "num_experts_per_tok": _chosen(fields, experts)}


def _experts_everywhere(fields: Fields, architecture: str) -> dict[str, Any]:
    # Softmax over the chosen is softmax over all, renormalised over the chosen.
    router = {
        "MixtralForCausalLM": RouterConfig(normalise=True),
        "GptOssForCausalLM": RouterConfig(normalise=True, bias=True),
        "MiniMaxM2ForCausalLM": RouterConfig(sigmoid=True, normalise=True, correction=True),
    }.get(architecture)
    if router is None:
        router = RouterConfig(normalise=fields.flag("norm_topk_prob", False))
    return {
        **_counts(fields),
        "moe_intermediate_size": fields.integer("intermediate_size"),
        "router": router,
        "moe_layers": (True,) * fields.integer("num_hidden_layers"),
        **(_clamped(fields) if architecture == "GptOssForCausalLM" else {}),
    }


def _qwen_experts(fields: Fields, architecture: str) -> dict[str, Any]:
    num_layers = fields.integer("num_hidden_layers")
    step = fields.integer("decoder_sparse_step", 1)
    plain = fields.raw("mlp_only_layers", [])
    if not isinstance(plain, list) or not all(isinstance(x, int) for x in plain):
        raise fields.fail("mlp_only_layers", plain, "a list of layer numbers")
    second = architecture == "Qwen2MoeForCausalLM"
    shared = fields.integer("shared_expert_intermediate_size") if second else 0
    return {
        **_counts(fields),
        "moe_intermediate_size": fields.integer("moe_intermediate_size"),
        "shared_intermediate_size": shared,
        "shared_gate": second,
        "router": RouterConfig(normalise=fields.flag("norm_topk_prob", False)),
        "moe_layers": tuple(i not in plain and (i + 1) % step == 0 for i in range(num_layers)),
    }


def _ernie_experts(fields: Fields) -> dict[str, Any]:
    num_layers = fields.integer("num_hidden_layers")
    experts = fields.integer("moe_num_experts", high=_MOST_EXPERTS)
    chosen, width = _chosen(fields, experts, "moe_k"), fields.integer("moe_intermediate_size")
    # Other names of the same, and what is not computed in any other way.
    same = {"num_experts": experts, "num_experts_per_tok": chosen}
    fields.only(same | {"moe_gate_act": "softmax", "moe_norm_min": 1e-12})
    first = fields.integer("moe_layer_start_index", 1, low=0)
    last = fields.integer("moe_layer_end_index", -1, low=-1)
    last = num_layers - 1 if last == -1 else last
    step = fields.integer("moe_layer_interval", 1)
    return {
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
        "shared_intermediate_size": fields.integer("moe_num_shared_experts", 2, low=0) * width,
        "router": RouterConfig(normalise=True, correction=True),
        "moe_layers": tuple(first <= i <= last and (i + 1) % step == 0 for i in range(num_layers)),
    }


def _hunyuan_experts(fields: Fields) -> dict[str, Any]:
    """All experts are as wide as intermediate_size says, the shared one too."""
    width, experts = fields.integer("intermediate_size"), _alike(fields, "num_experts", REQUIRED)
    if experts > _MOST_EXPERTS:
        raise fields.fail("num_experts", fields.values["num_experts"], f"at most {_MOST_EXPERTS}")
    chosen = _alike(fields, "moe_topk", REQUIRED)
    if chosen > experts:
        raise fields.fail("moe_topk", fields.values["moe_topk"], f"at most {experts} experts")
    plain = {"use_mixed_mlp_moe": True, "norm_topk_prob": True, "group_limited_greedy": False}
    fields.only(plain | {"moe_layer_num_skipped": 0})
    same = {"num_experts_per_tok": chosen, "num_local_experts": experts}
    for name, only in (same | {"num_shared_expert": 1, "moe_intermediate_size": width}).items():
        if _alike(fields, name, only) != only:
            raise fields.fail(name, fields.values[name], f"{only}, for each layer, or null")
    return {
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
        "shared_intermediate_size": width,
        "router": RouterConfig(normalise=True),
        "moe_layers": (True,) * fields.integer("num_hidden_layers"),
    }


def _hy_experts(fields: Fields) -> dict[str, Any]:
    """Hy3's experts are chosen as DeepSeek V3's, out of one group, under names of its own."""
    chosen_so = ("moe_router_use_sigmoid", "moe_router_enable_expert_bias", "route_norm")
    width = fields.integer("moe_intermediate_size")
    fields.only(dict.fromkeys(chosen_so, True) | {"expert_hidden_dim": width})
    scale = float(fields.number("router_scaling_factor", 2.826))
    return {
        **_counts(fields),
        "moe_intermediate_size": width,
        "shared_intermediate_size": fields.integer("num_shared_experts", 1, low=0) * width,
        "router": RouterConfig(sigmoid=True, normalise=True, scale=scale, correction=True),
        "moe_layers": _layers_behind_dense(fields, 1),
        "num_extra_layers": _extra_layers(fields),
    }


def _alike(fields: Fields, name: str, default: Any) -> Any:
    """An integer, or a list that has it for each layer."""
    value, num_layers = fields.raw(name, default), fields.integer("num_hidden_layers")
    if not isinstance(value, list):
        return fields.integer(name, default)
    if len(value) != num_layers or any(x != value[0] for x in value):
        raise fields.fail(name, value, f"one integer, the same for each of {num_layers} layers")
    return Fields(fields.file, {name: value[0]}).integer(name)


def _chosen(fields: Fields, experts: int, name: str = "num_experts_per_tok") -> int:
    chosen: int = fields.integer(name)
    if chosen > experts:
        raise fields.fail(name, chosen, f"at most {experts} experts")
    return chosen


def _clamped(fields: Fields) -> dict[str, Any]:
    """GPT-OSS's experts, which have biases and a clamped activation."""
    limit = fields.number("swiglu_limit", 7.0)
    if limit <= 0.0:
        raise fields.fail("swiglu_limit", limit, "a number above 0")
    chosen = fields.integer("num_experts_per_tok")
    if fields.integer("experts_per_token", chosen) != chosen:
        got = fields.raw("experts_per_token", None)
        raise fields.fail("experts_per_token", got, f"{chosen}, as num_experts_per_tok, or null")
    return {
        "experts_bias": True,
        "swiglu_limit": limit,
        "swiglu_alpha": fields.number("swiglu_alpha", 1.702),
    }


def _deepseek_experts(fields: Fields, architecture: str) -> dict[str, Any]:
    experts = fields.integer("n_routed_experts", high=_MOST_EXPERTS)
    chosen = _chosen(fields, experts)
    if fields.integer("moe_layer_freq", 1) != 1:
        raise fields.fail("moe_layer_freq", fields.raw("moe_layer_freq", 1), "1")
    width, solar = fields.integer("moe_intermediate_size"), architecture == "SolarOpenForCausalLM"
    if solar:
        fields.only({"first_k_dense_replace": 0})
    shared = fields.integer("n_shared_experts", int(solar), low=0)
    lists = architecture == "Glm4MoeLiteForCausalLM"
    usual = REQUIRED if architecture in _AS_V3_ITSELF else 0
    return {
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
        "shared_intermediate_size": shared * width,
        "router": _deepseek_router(fields, architecture, experts, chosen),
        "moe_layers": _layers_behind_dense(fields, usual, lists),
        "num_extra_layers": _extra_layers(fields),
    }


def _extra_layers(fields: Fields) -> int:
    """Layers behind the last one that predict tokens further ahead."""
    name = "num_nextn_predict_layers"
    return int(fields.integer(name, 0, low=0, high=_MOST_EXTRA_LAYERS))


def _layers_behind_dense(fields: Fields, usual: Any, lists: bool = True) -> tuple[bool, ...]:
    """Which layers have experts: the first are dense, as one of two fields says.

    usual: how many are dense if neither does. lists: whether mlp_layer_types is one of the two.
    """
    num_layers = fields.integer("num_hidden_layers")
    listed = fields.raw("mlp_layer_types", None) if lists else None
    num_dense = fields.integer("first_k_dense_replace", usual if listed is None else None, low=0)
    if listed is None:
        return tuple(i >= num_dense for i in range(num_layers))
    if not isinstance(listed, list) or len(listed) != num_layers:
        raise fields.fail("mlp_layer_types", listed, f"one for each of {num_layers} layers")
    if any(kind not in (_DENSE, _SPARSE) for kind in listed):
        raise fields.fail("mlp_layer_types", listed, f"{_DENSE} or {_SPARSE} for each layer")
    found = tuple(kind == _SPARSE for kind in listed)
    if num_dense is not None and found != tuple(i >= num_dense for i in range(num_layers)):
        accepted = "as many as in mlp_layer_types, or only one of the two"
        raise fields.fail("first_k_dense_replace", num_dense, accepted)
    return found


def _deepseek_router(fields: Fields, architecture: str, experts: int, chosen: int) -> RouterConfig:
    third, itself = architecture in _THIRD, architecture in _AS_V3_ITSELF
    scoring, methods = ("sigmoid", ("noaux_tc",)) if third else ("softmax", _V2_METHODS)
    # dots.llm1 gives its way to choose experts here.
    scorings = (scoring, *methods) if architecture == "Dots1ForCausalLM" else (scoring,)
    fields.one_of("scoring_func", fields.raw("scoring_func", scoring), scorings)
    method = fields.one_of("topk_method", fields.raw("topk_method", methods[0]), methods)
    one = REQUIRED if itself else 1
    normalise = fields.flag("norm_topk_prob", itself or architecture == "SolarOpenForCausalLM")
    scale = float(fields.number("routed_scaling_factor", one))
    if normalise and scale != 1.0 and not third:
        # DeepSeek's own code scales or normalises there, others do both.
        raise fields.fail("routed_scaling_factor", scale, "1.0 beside norm_topk_prob")
    groups, best = 1, 1
    if method != "greedy":
        groups, best = fields.integer("n_group", one), fields.integer("topk_group", one)
        if experts % groups:
            raise fields.fail("n_group", groups, f"a divisor of {experts} experts")
        if best > groups or chosen > best * (experts // groups):
            accepted = f"at most {groups} groups, with at least {chosen} experts together"
            raise fields.fail("topk_group", best, accepted)
        if third and experts // groups < 2:
            raise fields.fail("n_group", groups, "groups of two experts or more")
    return RouterConfig(
        sigmoid=third,
        normalise=normalise,
        scale=scale,
        correction=third,
        num_groups=groups,
        groups_per_tok=best,
        best_two=third,
    )
