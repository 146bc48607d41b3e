"""DeepSpeed under the contract: AutoTP's linears, the MoE layer, ZeRO-0 to ZeRO-2. Adapts modules, groups and options; no arithmetic lives here.

Importing this package does not import DeepSpeed; the patches wait until somebody else does.
"""
