"""What to change, for every cause a diagnosis names; ``docs/divergence.md`` has a section for each (``visible`` becomes ``mask`` or ``packing``)."""

from __future__ import annotations

CURES: dict[str, str] = {
    "order": (
        "Both sides are right and add in different orders. Fix one order on both sides: tio_megatron's contract does (docs/contract.md), or use "
        "the same kernel, the same number of ranks and fp32 partial sums."
    ),
    "order-by-owner": (
        "The place where a token lives decides the order of its sum (a ring or reduce-scatter that starts at the owner). Sum in an order of the "
        "global problem: gather the partial sums and add them by a fixed tree (docs/collectives.md)."
    ),
    "order-by-size": (
        "The library changes its algorithm with the size of the message, or from call to call. Do not let it add: move the bytes and add them "
        "yourself (docs/collectives.md), or pin the algorithm (NCCL_ALGO, NCCL_PROTO, HCCL's deterministic mode)."
    ),
    "order-by-batch": "The kernel chooses its blocks by the number of rows. Use batch-invariant kernels on both sides, or score with the batch that sampled.",
    "positions": "The sides give the tokens other positions. Count positions from 0 in every sequence, also inside a pack and behind left padding.",
    "mask": "The sides let a token see other keys. Compare attention masks: causal, sliding window, padding.",
    "packing": (
        "A boundary of a packed sequence is in the wrong place. Build cu_seqlens from the true lengths, without padding, and pass them to "
        "attention and to rotary positions."
    ),
    "padding": (
        "Padding tokens are routed to experts and take or move places of real ones. Keep them from the router (a padding mask), and use no capacity factor."
    ),
    "dropped-tokens": "Some tokens did not get all their experts: a capacity limit dropped them. Switch the capacity factor off.",
    "moved-rows": "Rows of experts come out at other tokens' places. Compare how each side sorts tokens by expert, and undoes it behind the experts.",
    "expert-weighting": (
        "One side multiplies an expert's row by its probability before the down projection (stock Megatron), the other behind it. Take one: the contract "
        "weights the finished, rounded row."
    ),
    "unwritten": "Rows of a buffer are read that nobody wrote. Zero the buffer or read only written rows; padding and empty experts are the usual places.",
    "temperature": "Apply the same temperature to the logits on both sides, and compare processed with processed log-probabilities (vLLM: logprobs_mode).",
    "sampling-filter": "One side renormalises after top-k or top-p filtering. Compare log-probabilities of the unfiltered distribution.",
    "logprob-dtype": "One side rounds logits or log-probabilities to bf16. Compute the log-softmax in fp32 on both.",
    "target-shift": "One side takes the log-probability of another token. Shift targets by exactly one.",
    "vocab-padding": "Padding rows of the vocabulary are counted in the softmax. Mask them to minus infinity, or sum over the true vocabulary only.",
    "norm-cast": "RMSNorm multiplies by its weight on different sides of the rounding. Take one: round((x * r) * w).",
    "norm-epsilon": "Give both norms the epsilon of the checkpoint's configuration.",
    "norm-weight": "One side adds 1 to the norm's weight or leaves it out. Convert the weight for that kind of norm.",
    "norm-mean": "One side subtracts the mean (LayerNorm for RMSNorm). Use the norm of the checkpoint's configuration.",
    "residual-rounding": (
        "A fused add and norm keeps the sum unrounded where the other rounds it. State one rounding point: round the sum, then normalise what was rounded."
    ),
    "residual-terms": "The residual stream is not the sum of the same two terms. Compare where the residual is taken.",
    "rope-table": "Keep rotary frequencies, angles and tables in fp32 or better; bf16 tables drift with the position.",
    "rope-theta": "Give both sides the rope_theta (and scaling) of the checkpoint's configuration.",
    "rope-pairs": "One side turns neighbouring elements, the other the two halves. Set the rotary style, or permute the projection when converting.",
    "extra-rounding": "One side rounds between two steps that the other fuses. State the rounding points and use one kernel, or round on both sides.",
    "activation": "The sides use other activation functions. Take the one of the checkpoint's configuration.",
    "gate-up-swapped": "Gate and up are swapped. Correct the order when the fused projection is loaded.",
    "dtype": (
        "One side casts an operand or the result of this product. Use the same types on both sides (an fp32 head and router need fp32 operands on both)."
    ),
    "router-softmax": "The softmax is taken before top-k on one side and after it on the other. Choose one: softmax over all experts, top-k, renormalise.",
    "router-normalise": "One side renormalises the chosen probabilities and the other does not. Follow norm_topk_prob on both.",
    "router-sum-order": "The chosen probabilities are summed in different orders. Sum them in ascending expert id.",
    "router-dtype": "Compute router logits and probabilities in fp32 on both sides (Megatron: moe_router_dtype='fp32').",
    "attention-scale": "The scores are scaled differently. Use head_dim ** -0.5, or what the configuration states.",
    "head-groups": "Query heads are mapped to other key/value heads. Correct the conversion of the fused projection.",
    "visible": "The sides let a token see other keys. Compare masks and boundaries.",
    "dropout": "Dropout is on. Set the model to evaluation mode and dropout to 0 when log-probabilities are computed.",
    "scale": "One side multiplies by a constant. Look for a scaling factor in the configuration that only one side reads.",
    "embedding-row": "The sides look up other rows: token ids are shifted. Compare preprocessing.",
    "shape": "The sides record tensors of different sizes. Compare the configurations.",
    "stale-copy": (
        "What this layer computes does not follow from its own parameters: a packed or cached copy of the weights was not refreshed after they "
        "changed. Refresh packed copies at every weight sync."
    ),
    "weights-missing": "The checkpoint's name for it was not found on load, so it kept its initial values. Load strictly, and compare names.",
    "weights-stale": "One side has an older version. Push the weights again, and compare digests of every parameter after each sync.",
    "weights-transposed": "One side stores it the other way round. Transpose it when it is converted.",
    "weights-dtype": "One side rounded it on load. Load with the checkpoint's type on both sides.",
    "weights-moved": "A name was mapped to another tensor when the checkpoint was converted. Correct the mapping.",
    "weights-rows": "Rows are in another order (fused or interleaved projections). Correct the conversion of this parameter.",
    "weights-scaled": "One side scales it. Apply the scale on both sides or on neither.",
    "weights-shape": "The sides have another shape for it: a shard or padding was taken for the whole. Record unsharded parameters, or correct the conversion.",
    "tie": "Two experts have the same score and the sides choose differently. Compute router logits in fp32 and let the lower id win on both sides.",
    "drift": "The choice follows logits that had drifted before. Cure the first difference.",
    "router-choice": "One side does not take the largest logits (a bias, groups of experts, noise). Use the same selection rule on both.",
    "no-token-rank": "A rank without tokens leaves out its collective or its graph and the others wait. Let every rank take part with an empty message.",
    "hang": "The ranks stopped at different points: some wait in a collective that others never enter. Compare what each rank does between the points named.",
}

LOOK = "Compare this operator's code on both sides: inputs and parameters are equal."
"""Where no cause is known."""
